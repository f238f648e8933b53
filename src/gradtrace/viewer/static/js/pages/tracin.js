// The TracIn page: a histogram of scores, the responses behind each bar, the validation set, and curves over training.

import { ChartGrid } from "../chart_grid.js";
import { nextOf, segmentedControl } from "../controls.js";
import { acceptedMark, button, element, fact, passDots, setAttributes } from "../dom.js";
import { count, fixed, MISSING, numberStyle, plural, sharedStart, signed } from "../format.js";
import { tracinCharts } from "../run_charts.js";
import { Histogram, scoreBins } from "../scores/histogram.js";
import { readTokens, ResponseText } from "../scores/response_text.js";

const SHOWN = ["all", "kept", "dropped"];
const ORDERS_OF_SCORES = ["low", "high"];
const MOST_ROWS = 60;
const COLUMNS = 5;
const MEANING = "Positive: a gradient step on this response lowers the validation loss. Negative: it raises it.";

export async function openTracinPage(context) {
  const { source, run, step } = context;
  const path = `runs/${run.id}/steps/${step}/tracin`;
  const structure = await source.json(path);
  return () => new TracinPage(context, path, structure);
}

class TracinPage {
  constructor(context, path, structure) {
    Object.assign(this, { context, path, structure, url: context.url });
    this.title = `TracIn, step ${structure.step}`;
    this.hints = [
      ["← →", "bar"],
      ["j k", "response"],
      ["↵", "open it"],
      ["f", "kept or dropped"],
      ["[ ]", "step"],
    ];
    this.candidates = structure.candidates;
    this.finite = this.candidates.filter((row) => Number.isFinite(row.score));
    this.zeros = this.finite.filter((row) => row.score === 0);
    this.bins = scoreBins(this.finite.filter((row) => row.score !== 0));
    this.texts = new Map();
    const cut = sharedStart(structure.groups.map((group) => group.text));
    for (const group of structure.groups) group.text = group.text.slice(cut);
    this.readUrl();
    this.node = element("div", "tracin-page");
    this.build();
    readTokens(this.node);
  }

  readUrl() {
    const bar = this.url.get("bar");
    this.bar = bar === "zero" && this.zeros.length ? "zero" : this.url.number("bar");
    if (typeof this.bar === "number" && this.bar >= this.bins.length) this.bar = null;
    this.shown = this.url.choice("show", SHOWN);
    this.order = this.url.choice("order", ORDERS_OF_SCORES);
    this.selected = this.url.number("sel");
    this.openGroup = this.url.number("val");
  }

  /* ---------- building ---------- */

  build() {
    const { structure } = this;
    const { meta } = structure;
    const rule = [
      meta.selection && `Rule: ${meta.selection}.`,
      meta.val_strategy && `Validation set: ${meta.val_strategy}.`,
      meta.method && `Method: ${meta.method}${meta.preconditioner === "adam" ? ", weighed as Adam weighs" : ""}.`,
    ];
    const sub = `Score of each response: its gradient times the validation gradient. ${rule.filter(Boolean).join(" ")}`;
    const title = element(
      "div",
      "title",
      element("h1", "", `TracIn, step ${structure.step}`),
      element("p", "sub", sub),
    );
    this.node.append(element("div", "head", title, this.facts()));
    this.node.append(this.diagnosis());
    this.histogram = this.bins.length ? new Histogram(this.bins, (bar) => this.choose(bar)) : null;
    this.list = element("tbody");
    this.caption = element("div", "list-caption");
    const table = element("table", "fixed responses", tableHead(), this.list);
    this.node.append(
      element(
        "div",
        "score-columns",
        element(
          "section",
          "score-left",
          this.histogramHead(),
          this.histogram?.node ?? this.noScores(),
          this.zeroButton(),
          this.layerNorms(),
        ),
        element("section", "", this.listControls(), this.caption, table),
      ),
    );
    this.charts = new ChartGrid([this.context.run, ...this.context.overlays], (step) => this.openStep(step));
    this.charts.show(tracinCharts(this.context.run));
    this.charts.step = this.charts.rest = structure.step;
    this.node.append(element("h2", "section-title", "Over training"), this.charts.node, this.validationSection());
  }

  facts() {
    const kept = this.candidates.filter((row) => row.kept).length;
    const positive = this.finite.filter((row) => row.score > 0).length;
    const { validation, meta } = this.structure;
    const prompts = new Set(validation.map((row) => row.group)).size;
    const reward = validation.reduce((sum, row) => sum + row.reward, 0) / validation.length;
    const facts = element(
      "div",
      "facts",
      fact(`${count(kept)}/${count(this.candidates.length)}`, "responses kept"),
      fact(this.finite.length ? `${fixed((100 * positive) / this.finite.length, 0)} %` : MISSING, "positive"),
    );
    if (validation.length)
      facts.append(fact(count(prompts), "validation prompts"), fact(fixed(reward, 2), "their mean reward"));
    if (Number.isFinite(meta.val_loss))
      facts.append(fact(numberStyle(meta.val_loss).plain(meta.val_loss), "validation loss"));
    return facts;
  }

  diagnosis() {
    const { note } = this.structure.meta;
    const diagnosis = [...(note ? [String(note)] : []), ...this.structure.diagnosis];
    const box = element("section", "diagnosis strip", element("h2", "", "Diagnosis"));
    const unmeasured = this.structure.columns.includes("score_low")
      ? ""
      : " How certain their signs are was not measured in this step (trainer.tracin.diagnose_every).";
    if (!diagnosis.length) box.append(element("p", "dim", `Nothing notable in this step's scores.${unmeasured}`));
    else box.append(element("ul", "", ...diagnosis.map((sentence) => element("li", "", sentence))));
    return box;
  }

  histogramHead() {
    const key = (name, words) => element("span", "key", element("i", `swatch ${name}`), words);
    return element(
      "header",
      "histogram-head",
      element("h2", "", "Scores"),
      element("p", "dim", MEANING),
      element(
        "p",
        "histogram-keys",
        key("kept-key", "kept"),
        key("dropped-key", "dropped"),
        key("p4", "positive"),
        key("n4", "negative"),
        element("span", "dim", "Click a bar for its responses."),
      ),
    );
  }

  noScores() {
    return element("p", "notice", "No response has a score other than zero in this step.");
  }

  zeroButton() {
    const strange = this.candidates.length - this.finite.length;
    const line = element("p", "zero-line-words");
    if (this.zeros.length)
      line.append(
        setAttributes(
          button("link-button", `${plural(this.zeros.length, "response")} with score 0`, () =>
            this.choose(this.bar === "zero" ? null : "zero"),
          ),
          { "data-bar": "zero" },
        ),
        " (a group whose rewards are all equal has no gradient). ",
      );
    if (strange) line.append(`${plural(strange, "score")} not finite.`);
    return line;
  }

  /** Where the validation gradient is large: its norm by layer group. */
  layerNorms() {
    const norms = Object.entries(this.structure.meta.val_norms ?? {}).filter(([, norm]) => Number.isFinite(norm));
    if (!norms.length) return null;
    const top = Math.max(...norms.map(([, norm]) => norm), 1e-300);
    const list = element("dl", "layer-norms");
    for (const [name, norm] of norms) {
      const bar = element("i", "bar-fill l4");
      bar.style.width = `${(100 * norm) / top}%`;
      list.append(
        element("dt", "", name.replaceAll("_", " ")),
        element("dd", "", element("span", "track", bar), element("span", "", numberStyle(top, 3).plain(norm))),
      );
    }
    return element("details", "layers", element("summary", "", "Validation gradient by layer, norms"), list);
  }

  listControls() {
    const control = (label, name, values, labels) =>
      segmentedControl({
        label,
        value: this[name === "show" ? "shown" : "order"],
        options: values.map((value, index) => ({ value, label: labels[index] })),
        onChange: (value) => this.set(name, value),
      });
    this.showControl = control("Show", "show", SHOWN, SHOWN);
    return element(
      "div",
      "controls",
      this.showControl,
      control("Order", "order", ORDERS_OF_SCORES, ["lowest first", "highest first"]),
    );
  }

  set(name, value) {
    this[name === "show" ? "shown" : "order"] = value;
    if (name === "show") this.showControl.select(value);
    this.url.update({ [name]: value });
    this.drawList();
  }

  /* ---------- the responses behind a bar ---------- */

  choose(bar) {
    this.bar = bar;
    this.selected = null;
    this.url.update({ bar, sel: null });
    this.histogram?.draw(bar);
    this.drawList();
    this.context.announce(this.captionText());
  }

  get members() {
    const all = this.bar === null ? this.finite : this.bar === "zero" ? this.zeros : this.bins[this.bar].members;
    const wanted = { all: () => true, kept: (row) => row.kept, dropped: (row) => !row.kept }[this.shown];
    const sign = this.order === "low" ? 1 : -1;
    return all.filter(wanted).sort((a, b) => sign * (a.score - b.score) || a.response - b.response);
  }

  captionText() {
    const where = this.bar === null ? "all scores" : this.bar === "zero" ? "score 0" : this.histogram.words(this.bar);
    const what = this.shown === "all" ? "" : ` ${this.shown}`;
    return `${plural(this.members.length, "response")}${what}, ${where}`;
  }

  drawList() {
    const members = this.members;
    this.visible = members.slice(0, MOST_ROWS);
    const selected = this.candidates.find((row) => row.response === this.selected);
    if (selected && members.includes(selected) && !this.visible.includes(selected)) this.visible.push(selected);
    const top = Math.max(...this.finite.map((row) => Math.abs(row.score)), 1e-300);
    this.caption.replaceChildren(element("b", "", this.captionText()));
    if (this.bar !== null) this.caption.append(button("link-button", "show all", () => this.choose(null)));
    this.list.replaceChildren();
    for (const row of this.visible) {
      this.list.append(this.responseRow(row, top));
      if (row.response === this.selected) this.list.append(this.openRow(row));
    }
    if (members.length > this.visible.length)
      this.list.append(wide("between", `${count(members.length - this.visible.length)} more`));
    if (!members.length) this.list.append(wide("dim", "No such response."));
  }

  responseRow(row, top) {
    const group = this.structure.groups[row.group];
    const bar = element("i", row.score < 0 ? "n4" : "p4");
    bar.style.width = `${(50 * Math.abs(row.score)) / top}%`;
    const style = numberStyle(top);
    const score = element(
      "td",
      "number c-score",
      element("span", "", style.signed(row.score)),
      element("span", "diverging", bar),
    );
    if (Number.isFinite(row.score_low ?? NaN))
      score.title = `90 % bootstrap interval over validation prompts: ${style.signed(row.score_low)} to ${style.signed(row.score_high)}`;
    const uncertain = Number.isFinite(row.score_low ?? NaN) && row.score_low <= 0 && row.score_high >= 0;
    const fate = element(
      "td",
      "c-fate",
      element("span", row.kept ? "fate kept" : "fate dropped", row.kept ? "kept" : "dropped"),
    );
    const remarks = [
      row.reason,
      row.weight !== null && row.kept && row.weight !== 1 ? `weight ${fixed(row.weight, 2)}` : "",
      uncertain ? "sign unsure" : "",
      row.flipped ? "reward flipped" : "",
    ];
    fate.append(element("span", "dim", remarks.filter(Boolean).join(", ")));
    fate.title = remarks.filter(Boolean).join(", ");
    const node = setAttributes(
      element(
        "tr",
        `opens${row.response === this.selected ? " current" : ""}`,
        element("td", "c-prompt mono", group.text),
        element("td", "c-text mono", row.accepted === null ? null : acceptedMark(row.accepted), " ", row.text),
        element("td", "number", fixed(row.reward, 2)),
        score,
        fate,
      ),
      { "data-response": row.response, "aria-expanded": String(row.response === this.selected) },
    );
    node.addEventListener("click", () => this.select(row.response === this.selected ? null : row.response));
    return node;
  }

  /** The whole response, coloured by entropy where the file has it. */
  openRow(row) {
    const cell = setAttributes(element("td", "", element("p", "dim", "Loading …")), { colspan: COLUMNS });
    this.fill(cell, row);
    return element("tr", "opened", cell);
  }

  async fill(cell, row) {
    const group = this.structure.groups[row.group];
    let whole;
    try {
      whole = await this.textOf(row.response);
    } catch (error) {
      cell.replaceChildren(element("p", "dim", `${error.message} Its beginning: ${row.text}`));
      return;
    }
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
    if (group.page !== null && this.isOnGroupPage()) {
      const link = element("a", "link-button", `tokens of group ${group.page}`);
      link.href = this.context.href("group", { group: group.page, step: this.structure.step });
      line.append(" · ", link);
    }
    cell.replaceChildren(line, whole.promptNode(), whole.map(hasEntropy ? "entropy" : null, top));
  }

  isOnGroupPage() {
    return this.context.run.tracedSteps.includes(this.structure.step);
  }

  async textOf(response) {
    if (!this.texts.has(response))
      this.texts.set(response, new ResponseText(await this.context.source.json(`${this.path}/responses/${response}`)));
    return this.texts.get(response);
  }

  select(response) {
    this.selected = response;
    this.url.update({ sel: response });
    this.drawList();
    const row = this.list.querySelector(`[data-response="${response}"]`);
    if (row && response !== null) row.scrollIntoView({ block: "nearest" });
  }

  /* ---------- the validation set ---------- */

  validationSection() {
    const { validation, groups } = this.structure;
    const section = element("section", "validation", element("h2", "section-title", "Validation prompts"));
    if (!validation.length) {
      section.append(element("p", "dim", "The validation set of this step was not stored."));
      return section;
    }
    this.validationBody = element("tbody");
    this.byGroup = Map.groupBy(validation, (row) => row.group);
    const heads = ["Prompt", "Best reward", "Mean reward"];
    const head = element("tr", "", ...heads.map((name, index) => element("th", index === 2 ? "number" : "", name)));
    section.append(
      element("p", "dim", "Their gradient is what every score refers to. Click one to read its responses."),
      element("table", "fixed validation-table", element("thead", "", head), this.validationBody),
    );
    this.drawValidation(groups);
    return section;
  }

  drawValidation(groups = this.structure.groups) {
    this.validationBody.replaceChildren();
    for (const [index, rows] of this.byGroup) {
      const rewards = rows.map((row) => row.reward);
      const best = Math.max(...rewards);
      const isOpen = this.openGroup === index;
      const node = setAttributes(
        element(
          "tr",
          `opens${isOpen ? " current" : ""}`,
          element("td", "mono", groups[index].text),
          element(
            "td",
            "",
            passDots(
              rewards.filter((reward) => reward === best && best > Math.min(...rewards, 0)).length,
              rewards.length,
            ),
            ` ${fixed(best, 2)}`,
          ),
          element("td", "number", fixed(rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length, 2)),
        ),
        { "data-validation": index, "aria-expanded": String(isOpen) },
      );
      node.addEventListener("click", () => {
        this.openGroup = isOpen ? null : index;
        this.url.update({ val: this.openGroup });
        this.drawValidation();
      });
      this.validationBody.append(node);
      if (isOpen) this.validationBody.append(validationRow(rows));
    }
  }

  /* ---------- living ---------- */

  mounted() {
    this.histogram?.draw(this.bar);
    this.drawList();
    this.charts.draw();
    this.resize = this.charts.watchWidth();
    if (this.histogram) {
      let width = this.histogram.node.clientWidth;
      this.histogramResize = new ResizeObserver(() => {
        if (this.histogram.node.clientWidth === width) return;
        width = this.histogram.node.clientWidth;
        this.histogram.draw(this.bar);
      });
      this.histogramResize.observe(this.histogram.node);
    }
  }

  update() {
    this.charts.show(tracinCharts(this.context.run));
    this.charts.draw();
  }

  openStep(step) {
    const steps = this.context.run.stepsOf(["tracin"]);
    const nearest = steps.reduce(
      (best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best),
      steps[0],
    );
    this.context.go("tracin", { step: nearest });
  }

  moveBar(direction) {
    const filled = this.bins.map((bin, index) => (bin.members.length ? index : -1)).filter((index) => index >= 0);
    if (!filled.length) return;
    const at = filled.indexOf(this.bar);
    const next =
      at < 0 ? (direction > 0 ? 0 : filled.length - 1) : Math.max(0, Math.min(filled.length - 1, at + direction));
    this.choose(filled[next]);
  }

  moveRow(direction) {
    const at = this.visible.findIndex((row) => row.response === this.cursor);
    const next = this.visible[Math.max(0, Math.min(this.visible.length - 1, at + direction))];
    if (!next) return;
    this.cursor = next.response;
    for (const row of this.list.querySelectorAll("tr.opens"))
      row.classList.toggle("current", Number(row.dataset.response) === this.cursor);
    this.list.querySelector("tr.current")?.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const actions = {
      ArrowRight: () => this.moveBar(1),
      ArrowLeft: () => this.moveBar(-1),
      j: () => this.moveRow(1),
      k: () => this.moveRow(-1),
      Enter: () => this.cursor !== undefined && this.select(this.cursor === this.selected ? null : this.cursor),
      f: () => this.set("show", nextOf(SHOWN, this.shown)),
      Escape: () => (this.selected === null ? this.choose(null) : this.select(null)),
    };
    if (!actions[event.key]) return false;
    actions[event.key]();
    return true;
  }

  destroy() {
    this.resize?.disconnect();
    this.histogramResize?.disconnect();
  }
}

function tableHead() {
  const heads = [
    ["c-prompt", "Prompt"],
    ["c-text", "Response"],
    ["number c-reward", "Reward"],
    ["number c-score", "Score"],
    ["c-fate", "What happened"],
  ];
  return element("thead", "", element("tr", "", ...heads.map(([name, text]) => element("th", name, text))));
}

function wide(className, text) {
  return element("tr", className, setAttributes(element("td", "", text), { colspan: COLUMNS }));
}

function validationRow(rows) {
  const list = element("ul", "validation-responses");
  for (const row of rows)
    list.append(element("li", "", element("b", "", fixed(row.reward, 2)), element("span", "mono", row.text)));
  return element("tr", "opened", setAttributes(element("td", "", list), { colspan: 3 }));
}
