// The TracIn page: a histogram of scores, the responses behind each bar, the validation set, and curves over training.

import { nextOf } from "../controls.js";
import { button, divergingBar, element, linkTo, tableOf } from "../dom.js";
import { fixed, numberStyle, plural, signed } from "../format.js";
import { Histogram, scoreBins } from "../plots.js";
import { tracinCharts } from "../run_charts.js";
import { ResponseList, ResponseTexts, readTokens } from "../scores/responses.js";
import { ValidationSet, diagnosisBox, histogramHead, layerNorms, scoreFacts } from "../scores/summary.js";
import { largestSize } from "../statistics.js";
import { Page, neighbourIn, opensInstrument, pageHead } from "./page.js";

const SHOWN = { all: () => true, kept: (row) => row.kept, dropped: (row) => !row.kept };
const ORDERS_OF_SCORES = { low: "lowest first", high: "highest first" };
const HEADS = {
  Prompt: "c-prompt",
  Response: "c-text",
  Reward: "number c-reward",
  Score: "number c-score",
  "What happened": "c-fate",
};

const HINTS = { "← →": "bar", "j k": "response", "↵": "open it", f: "kept or dropped", "[ ]": "step" };

class TracinPage extends Page {
  constructor(context, path, structure) {
    super(context, `TracIn, step ${structure.step}`, HINTS, "tracin-page");
    this.structure = structure;
    this.candidates = structure.candidates;
    this.finite = this.candidates.filter((row) => Number.isFinite(row.score));
    this.zeros = this.finite.filter((row) => row.score === 0);
    this.bins = scoreBins(this.finite.filter((row) => row.score !== 0));
    this.texts = new ResponseTexts(context.source, path);
    this.top = largestSize(
      this.finite.map((row) => row.score),
      1e-300,
    );
    const bar = this.url.number("bar");
    /** @type {any} the number of a bar, "zero", or null for all scores */
    this.bar = this.url.get("bar") === "zero" && this.zeros.length ? "zero" : bar < this.bins.length ? bar : null;
    this.show = this.url.choice("show", Object.keys(SHOWN));
    this.order = this.url.choice("order", Object.keys(ORDERS_OF_SCORES));
    this.build();
    readTokens(this.node);
  }

  /* ---------- building ---------- */

  build() {
    const { structure } = this;
    const { meta } = structure;
    // Before its first step Adam has no moments to weigh by.
    const weighing = meta.weighed === false ? ", not weighed: Adam has no state yet" : ", weighed as Adam weighs";
    const rule = [
      meta.selection && `Rule: ${meta.selection}.`,
      meta.val_strategy && `Validation set: ${meta.val_strategy}.`,
      meta.method && `Method: ${meta.method}${meta.preconditioner === "adam" ? weighing : ""}.`,
    ];
    const sub = `Score of each response: its gradient times the validation gradient. ${rule.filter(Boolean).join(" ")}`;
    this.histogram = this.bins.length ? new Histogram(this.bins, (bar) => this.choose(bar)) : null;
    this.list = new ResponseList({
      url: this.url,
      groups: structure.groups,
      texts: this.texts,
      width: Object.keys(HEADS).length,
      cells: (row) => this.cells(row),
      opened: (row, whole) => this.opened(row, whole),
    });
    this.caption = element("div", "list-caption");
    const table = tableOf("fixed responses", HEADS, this.list.node);
    const bars =
      this.histogram?.node ?? element("p", "notice", "No response has a score other than zero in this step.");
    const left = element("section", "score-left", histogramHead(), bars, this.zeroButton(), layerNorms(meta));
    this.charts = this.stepCharts("tracin", structure.step, tracinCharts(this.run));
    const onOpen = (val) => this.url.update({ val });
    this.node.append(
      pageHead(`TracIn, step ${structure.step}`, sub, scoreFacts(structure)),
      diagnosisBox(structure),
      element("div", "score-columns", left, element("section", "", this.listControls(), this.caption, table)),
      element("h2", "section-title", "Over training"),
      this.charts.node,
      new ValidationSet(structure, this.url.number("val"), onOpen).node,
    );
  }

  zeroButton() {
    const strange = this.candidates.length - this.finite.length;
    const line = element("p", "zero-line-words");
    if (this.zeros.length) {
      const toggle = () => this.choose(this.bar === "zero" ? null : "zero");
      const words = `${plural(this.zeros.length, "response")} with score 0`;
      const choose = button("link-button", words, toggle, { "data-bar": "zero" });
      line.append(choose, " (a group whose rewards are all equal has no gradient). ");
    }
    if (strange) line.append(`${plural(strange, "score")} not finite.`);
    return line;
  }

  listControls() {
    const draw = () => this.drawList();
    this.showControl = this.choiceOf("Show", "show", Object.keys(SHOWN), draw);
    return element("div", "controls", this.showControl, this.choiceOf("Order", "order", ORDERS_OF_SCORES, draw));
  }

  /* ---------- the responses behind a bar ---------- */

  choose(bar) {
    this.bar = bar;
    this.list.selected = null;
    this.url.update({ bar, sel: null });
    this.histogram?.draw(bar);
    this.drawList();
    this.context.announce(this.captionText());
  }

  get members() {
    const all = this.bar === null ? this.finite : this.bar === "zero" ? this.zeros : this.bins[this.bar].members;
    const sign = this.order === "low" ? 1 : -1;
    return all.filter(SHOWN[this.show]).sort((a, b) => sign * (a.score - b.score) || a.response - b.response);
  }

  captionText() {
    const where = this.bar === null ? "all scores" : this.bar === "zero" ? "score 0" : this.histogram.words(this.bar);
    const what = this.show === "all" ? "" : ` ${this.show}`;
    return `${plural(this.members.length, "response")}${what}, ${where}`;
  }

  drawList() {
    this.caption.replaceChildren(element("b", "", this.captionText()));
    if (this.bar !== null) this.caption.append(button("link-button", "show all", () => this.choose(null)));
    this.list.draw(this.members);
  }

  /** Score and fate of a response. */
  cells(row) {
    const style = numberStyle(this.top);
    const isMeasured = Number.isFinite(row.score_low);
    const ends = isMeasured ? `${style.signed(row.score_low)} to ${style.signed(row.score_high)}` : "";
    const title = isMeasured ? `90 % bootstrap interval over validation prompts: ${ends}` : null;
    const word = row.kept ? "kept" : "dropped";
    const remarks = [
      row.reason,
      row.weight !== null && row.kept && row.weight !== 1 ? `weight ${fixed(row.weight, 2)}` : "",
      isMeasured && row.score_low <= 0 && row.score_high >= 0 ? "sign unsure" : "",
      row.flipped ? "reward flipped" : "",
    ];
    const why = remarks.filter(Boolean).join(", ");
    return [
      ["number c-score", { title }, element("span", "", style.signed(row.score)), divergingBar(row.score, this.top)],
      ["c-fate", { title: why }, element("span", `fate ${word}`, word), element("span", "dim", why)],
    ];
  }

  /** The whole response, coloured by entropy where the file has it. */
  opened(row, whole) {
    const { entropy } = whole.channels;
    const group = this.structure.groups[row.group];
    const facts = [
      `group ${group.group_id}`,
      plural(row.length, "token"),
      `reward ${fixed(row.reward, 2)}`,
      row.advantage === null ? "" : `advantage ${signed(row.advantage, 2)}`,
      entropy ? "colour: entropy" : "",
    ];
    const line = element("p", "dim", facts.filter(Boolean).join(" · "));
    if (group.page !== null && this.run.tracedSteps.includes(this.structure.step)) {
      const href = this.context.href("group", { group: group.page, step: this.structure.step });
      line.append(" · ", linkTo(href, "link-button", `tokens of group ${group.page}`));
    }
    return [line, whole.promptNode(), whole.map(entropy ? "entropy" : null, largestSize(entropy ?? []))];
  }

  /* ---------- living ---------- */

  mounted() {
    this.drawToWidth(this.charts.node, () => this.charts.draw());
    if (this.histogram) this.drawToWidth(this.histogram.node, () => this.histogram.draw(this.bar));
    this.drawList();
  }

  update() {
    this.charts.show(tracinCharts(this.run));
    this.charts.draw();
  }

  moveBar(direction) {
    const filled = [...this.bins.keys()].filter((index) => this.bins[index].members.length);
    if (!filled.length) return;
    const isChosen = filled.includes(this.bar);
    this.choose(isChosen ? neighbourIn(filled, this.bar, direction) : filled.at(direction > 0 ? 0 : -1));
  }

  get actions() {
    return {
      ArrowRight: () => this.moveBar(1),
      ArrowLeft: () => this.moveBar(-1),
      ...this.list.actions,
      f: () => this.showControl.choose(nextOf(Object.keys(SHOWN), this.show)),
      Escape: () => (this.list.selected === null ? this.choose(null) : this.list.select(null)),
    };
  }
}

export const openTracinPage = opensInstrument(TracinPage);
