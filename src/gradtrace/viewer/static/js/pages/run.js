// The run page: curves over training, several runs laid over one another, and the last steps as a table.

import { ChartGrid } from "../charts.js";
import { nextOf, searchBox } from "../controls.js";
import { append, button, element, emptyState, factList, linkTo, rowOf, svgElement, tableOf } from "../dom.js";
import { MISSING, fixed, general, signed } from "../format.js";
import { MAIN_CHARTS, MEASURED_CHARTS, metricChart, overheadOf } from "../run_charts.js";
import { meanOf } from "../statistics.js";
import { Page, pageHead, problemNotes } from "./page.js";

const SMOOTHING = { 0: "off", 0.6: "0.6", 0.85: "0.85" };
const TABLE_STEPS = 8;
const MOST_NAMES = 60;

export async function openRunPage(context) {
  return () => new RunPage(context);
}

/** The numbers of a step in the table of the last ones. @type {[string, (row: Record<string, number>) => string][]} */
const COLUMNS = [
  ["Reward", (row) => fixed(row["critic/rewards/mean"], 3)],
  ["Entropy", (row) => fixed(row["actor/entropy"], 3)],
  ["Length", (row) => fixed(row["response_length/mean"], 1)],
  ["Mixed groups", (row) => ratio(row["influence_trace/uid_mixed"], row["influence_trace/uid_total"])],
  ["Δ entropy, measured", (row) => signed(row["entropy_probe/delta_h_measured"], 4)],
  ["predicted", (row) => signed(row["entropy_probe/delta_h_predicted"], 4)],
  ["Tracing", (row) => (overheadOf(row) === undefined ? MISSING : `+${fixed(100 * overheadOf(row), 1)} %`)],
];

const HINTS = { "← →": "step", "↵": "open step", m: "smoothing", "/": "metric" };

class RunPage extends Page {
  constructor(context) {
    super(context, "run", HINTS);
    this.runs = [context.run, ...context.overlays];
    this.smooth = this.url.choice("smooth", Object.keys(SMOOTHING), "0.6");
    this.head = element("div");
    this.notices = element("div");
    this.story = element("p", "story");
    this.keys = element("div", "keys");
    this.grid = new ChartGrid(this.runs, (step) => this.openStep(step));
    this.grid.step = this.url.number("x");
    this.table = element("table");
    this.picker = element("section", "metric-picker");
    this.node.append(this.head, this.story, this.notices, this.keys, this.grid.node, this.table, this.picker);
    this.makeCharts();
  }

  makeCharts() {
    this.added = this.url.getAll("chart");
    this.measured = this.measuredCharts();
    this.grid.show([...MAIN_CHARTS, ...this.measured, ...this.added.map(metricChart)]);
  }

  /** Charts of what only some runs measure, such as scores held against real optimizer steps. */
  measuredCharts() {
    return MEASURED_CHARTS.filter(({ lines: [first] }) => this.runs.some((run) => first.points(run).length > 0));
  }

  mounted() {
    this.update();
    this.drawToWidth(this.grid.node, () => this.draw());
  }

  /** Everything that changes when a step is added. */
  update() {
    if (this.measured.length !== this.measuredCharts().length) this.makeCharts();
    this.showStory().catch(() => this.story.replaceChildren());
    this.replace("head", pageHead(this.run.name, this.run.description, this.facts()));
    this.showNotices();
    this.showKeys();
    this.draw();
    this.replace("table", this.recentSteps());
    this.showPicker();
  }

  /** Put a part of the page in the place of what it was. */
  replace(name, node) {
    this[name].replaceWith(node);
    this[name] = node;
  }

  /** What the run says so far, told anew when a step was added. */
  async showStory() {
    if (this.told === this.run.lastStep) return;
    this.told = this.run.lastStep;
    const { sentence } = await this.context.source.json(`runs/${this.run.id}/story`);
    this.story.textContent = sentence;
  }

  facts() {
    const last = (series) => meanOf(series.slice(-5).map((point) => point.value));
    const lastOf = (name) => last(this.run.series(name));
    const overhead = last(this.run.series("influence overhead", overheadOf));
    const seconds = lastOf("timing_s/step");
    return factList(
      [fixed(lastOf("critic/rewards/mean"), 2), "reward, last 5"],
      [fixed(lastOf("actor/entropy"), 3), "entropy, nats"],
      [Number.isFinite(overhead) ? `+${fixed(100 * overhead, 0)} %` : MISSING, "tracing overhead"],
      [Number.isFinite(seconds) ? `${fixed(seconds, 2)} s` : MISSING, "per step"],
    );
  }

  showNotices() {
    const waiting = this.run.isLive
      ? "The first step is still running; the curves appear by themselves."
      : "metrics.jsonl has no line.";
    this.notices.replaceChildren(
      ...(this.run.rows.size ? [] : [emptyState("h2", "No metrics yet", waiting)]),
      ...problemNotes(this.run, "Left out: "),
    );
  }

  showKeys() {
    const keys = this.runs.map((run, index) => {
      const line = svgElement("path", { d: "M0 4H22", class: `line run-${index % 6}` });
      const sample = svgElement("svg", { width: 22, height: 8, "aria-hidden": "true" }, line);
      return element("span", "key", sample, element("span", "mono", run.name), element("span", "dim", run.stateLine()));
    });
    this.smoothing = this.choiceOf("Smoothing", "smooth", SMOOTHING, () => this.draw());
    const how = element("span", "key dim wide-only", "Hover to read a step in all charts, click to open it");
    this.keys.replaceChildren(...keys, element("span", "grow"), how, this.smoothing);
  }

  draw() {
    this.grid.draw(Number(this.smooth));
  }

  openStep(step) {
    if (step <= this.run.lastStep) this.context.go("step", { step });
  }

  /** Why the page of this step cannot be opened; empty where it can. */
  whyNotTraced(step) {
    if (this.run.tracedSteps.includes(step)) return "";
    if (!this.context.source.isLive) return "not in this report";
    return this.run.isLive && step === this.run.lastStep ? "trace being written" : "not traced";
  }

  recentSteps() {
    const rows = this.run.metricSteps.slice(-TABLE_STEPS).reverse();
    const lines = rows.map((step) => {
      const link = linkTo(this.context.href("step", { step }), "", String(step));
      const cells = COLUMNS.map(([, value]) => ["number", value(this.run.rows.get(step))]);
      return rowOf("opens", { onclick: () => this.openStep(step) }, link, ...cells, ["dim", this.whyNotTraced(step)]);
    });
    const heads = [element("th", "", "Step"), ...COLUMNS.map(([name]) => element("th", "number", name))];
    const last = element("th", "", element("span", "visually-hidden", "Trace"));
    const table = tableOf("fixed recent", element("tr", "", ...heads, last), element("tbody", "", ...lines));
    table.prepend(element("caption", "visually-hidden", "The last steps of this run"));
    table.hidden = !lines.length;
    return table;
  }

  /** Any metric of the run as a further chart. */
  showPicker() {
    if (this.picker.contains(document.activeElement)) return;
    const known = this.picker.querySelector("input")?.value ?? "";
    const names = element("div", "names");
    const list = (filter) => {
      const matching = this.run.metricNames.filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
      names.replaceChildren(...matching.slice(0, MOST_NAMES).map((name) => this.metricToggle(name)));
      const more = matching.length - MOST_NAMES;
      if (more > 0) names.append(element("span", "dim", `and ${more} more`));
    };
    const box = searchBox("Find a metric", "Find a metric to chart", known, list);
    this.picker.replaceChildren(
      element("h2", "", "All metrics"),
      element("div", "controls", box, element("span", "dim", "Choose metrics to chart them above.")),
      names,
    );
    list(known);
    this.picker.hidden = !this.run.metricNames.length;
  }

  metricToggle(name) {
    const isShown = this.added.includes(name);
    const toggle = () => {
      this.url.update({ chart: isShown ? this.added.filter((each) => each !== name) : [...this.added, name] });
      this.makeCharts();
      this.draw();
      this.showPicker();
    };
    const node = button(isShown ? "metric on" : "metric", name, toggle, { "aria-pressed": String(isShown) });
    return append(node, element("span", "dim", general(this.run.series(name).at(-1)?.value)));
  }

  get actions() {
    const move = (direction) => {
      const { from, to } = this.grid.domain;
      const start = this.grid.step ?? (direction > 0 ? from - 1 : Math.min(to, this.run.lastStep) + 1);
      this.grid.point(Math.max(from, Math.min(to, start + direction)));
      const { step } = this.grid;
      this.url.update({ x: step });
      const rewards = this.run.rows.get(step)?.["critic/rewards/mean"];
      this.context.announce(`step ${step}, reward ${fixed(rewards, 3)}`);
    };
    return {
      ArrowRight: () => move(1),
      ArrowLeft: () => move(-1),
      Enter: () => this.grid.step !== null && this.openStep(this.grid.step),
      m: () => this.smoothing.choose(nextOf(Object.keys(SMOOTHING), this.smooth)),
      Escape: () => this.grid.point(null),
    };
  }
}

function ratio(part, whole) {
  return whole === undefined ? MISSING : `${part} / ${whole}`;
}
