// The TracIn page: a histogram of scores, the responses behind each bar, the validation set, and curves over training.

import { nextOf } from "../controls.js";
import { button, divergingBar, element, linkTo, tableOf } from "../dom.js";
import { fixed, numberStyle, plural, signed } from "../format.js";
import { neighbourIn, opensInstrument, Page, pageHead } from "../page.js";
import { tracinCharts } from "../run_charts.js";
import { Histogram, scoreBins } from "../scores/histogram.js";
import { diagnosisBox, histogramHead, layerNorms, scoreFacts } from "../scores/overview.js";
import { ResponseList } from "../scores/response_list.js";
import { readTokens, ResponseTexts } from "../scores/response_text.js";
import { ValidationSet } from "../scores/validation_set.js";

const SHOWN = ["all", "kept", "dropped"];
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
    this.top = Math.max(...this.finite.map((row) => Math.abs(row.score)), 1e-300);
    this.readUrl();
    this.build();
    readTokens(this.node);
  }

  readUrl() {
    const bar = this.url.get("bar");
    this.bar = bar === "zero" && this.zeros.length ? "zero" : this.url.number("bar");
    if (typeof this.bar === "number" && this.bar >= this.bins.length) this.bar = null;
    this.show = this.url.choice("show", SHOWN);
    this.order = this.url.choice("order", Object.keys(ORDERS_OF_SCORES));
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
    this.node.append(pageHead(`TracIn, step ${structure.step}`, sub, scoreFacts(structure)), diagnosisBox(structure));
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
    const right = element("section", "", this.listControls(), this.caption, table);
    this.node.append(element("div", "score-columns", left, right));
    this.charts = this.stepCharts("tracin", structure.step, tracinCharts(this.run));
    this.node.append(element("h2", "section-title", "Over training"), this.charts.node);
    const onOpen = (val) => this.url.update({ val });
    this.node.append(new ValidationSet(structure, this.url.number("val"), onOpen).node);
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
    this.showControl = this.choiceOf("Show", "show", SHOWN, draw);
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
    const wanted = { all: () => true, kept: (row) => row.kept, dropped: (row) => !row.kept }[this.show];
    const sign = this.order === "low" ? 1 : -1;
    return all.filter(wanted).sort((a, b) => sign * (a.score - b.score) || a.response - b.response);
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
    const { top } = this;
    const style = numberStyle(top);
    const number = element("span", "", style.signed(row.score));
    const score = element("td", "number c-score", number, divergingBar(row.score, top));
    const isMeasured = Number.isFinite(row.score_low ?? NaN);
    if (isMeasured)
      score.title = `90 % bootstrap interval over validation prompts: ${style.signed(row.score_low)} to ${style.signed(row.score_high)}`;
    const uncertain = isMeasured && row.score_low <= 0 && row.score_high >= 0;
    const word = row.kept ? "kept" : "dropped";
    const fate = element("td", "c-fate", element("span", `fate ${word}`, word));
    const remarks = [
      row.reason,
      row.weight !== null && row.kept && row.weight !== 1 ? `weight ${fixed(row.weight, 2)}` : "",
      uncertain ? "sign unsure" : "",
      row.flipped ? "reward flipped" : "",
    ];
    fate.title = remarks.filter(Boolean).join(", ");
    fate.append(element("span", "dim", fate.title));
    return [score, fate];
  }

  /** The whole response, coloured by entropy where the file has it. */
  opened(row, whole) {
    const group = this.structure.groups[row.group];
    const hasEntropy = Boolean(whole.channels.entropy);
    const top = hasEntropy ? Math.max(...whole.channels.entropy) : 0;
    const facts = [
      `group ${group.group_id}`,
      plural(row.length, "token"),
      `reward ${fixed(row.reward, 2)}`,
      row.advantage === null ? "" : `advantage ${signed(row.advantage, 2)}`,
      hasEntropy ? "colour: entropy" : "",
    ];
    const line = element("p", "dim", facts.filter(Boolean).join(" · "));
    if (group.page !== null && this.run.tracedSteps.includes(this.structure.step)) {
      const href = this.context.href("group", { group: group.page, step: this.structure.step });
      line.append(" · ", linkTo(href, "link-button", `tokens of group ${group.page}`));
    }
    return [line, whole.promptNode(), whole.map(hasEntropy ? "entropy" : null, top)];
  }

  /* ---------- living ---------- */

  mounted() {
    this.histogram?.draw(this.bar);
    this.drawList();
    this.charts.draw();
    this.watchWidth(this.charts.node, () => this.charts.draw());
    if (this.histogram) this.watchWidth(this.histogram.node, () => this.histogram.draw(this.bar));
  }

  update() {
    this.charts.show(tracinCharts(this.run));
    this.charts.draw();
  }

  moveBar(direction) {
    const filled = this.bins.map((bin, index) => (bin.members.length ? index : -1)).filter((index) => index >= 0);
    if (!filled.length) return;
    const isChosen = filled.includes(this.bar);
    this.choose(isChosen ? neighbourIn(filled, this.bar, direction) : filled.at(direction > 0 ? 0 : -1));
  }

  get actions() {
    return {
      ArrowRight: () => this.moveBar(1),
      ArrowLeft: () => this.moveBar(-1),
      ...this.list.actions,
      f: () => this.showControl.choose(nextOf(SHOWN, this.show)),
      Escape: () => (this.list.selected === null ? this.choose(null) : this.list.select(null)),
    };
  }
}

export const openTracinPage = opensInstrument(TracinPage);
