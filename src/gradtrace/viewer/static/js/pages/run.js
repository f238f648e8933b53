// The run page: curves over training, several runs laid over one another, and the last steps as a table.

import { ChartGrid } from "../chart_grid.js";
import { nextOf, searchBox } from "../controls.js";
import { append, button, element, emptyState, fact, linkTo, svgElement } from "../dom.js";
import { fixed, general, MISSING, signed } from "../format.js";
import { Page } from "../page.js";
import { meanOf } from "../scales.js";
import { MAIN_CHARTS, MEASURED_CHARTS, metricChart, overheadOf } from "../run_charts.js";

const SMOOTHING = ["0", "0.6", "0.85"];
const TABLE_STEPS = 8;
const MOST_NAMES = 60;

export async function openRunPage(context) {
  return () => new RunPage(context);
}

const HINTS = { "← →": "step", "↵": "open step", m: "smoothing", "/": "metric" };

class RunPage extends Page {
  constructor(context) {
    super(context, "run", HINTS);
    this.runs = [context.run, ...context.overlays];
    this.smooth = this.url.choice("smooth", SMOOTHING, "0.6");
    this.facts = element("div", "facts");
    this.subtitle = element("p", "sub");
    const title = element("div", "title", element("h1", "", this.run.name), this.subtitle);
    this.notices = element("div");
    this.story = element("p", "story");
    this.node.append(element("div", "head", title, this.facts), this.story, this.notices);
    this.keys = element("div", "keys");
    this.grid = new ChartGrid(this.runs, (step) => this.openStep(step));
    this.grid.step = this.url.number("x");
    this.table = element("table", "fixed recent");
    this.picker = element("section", "metric-picker");
    this.node.append(this.keys, this.grid.node, this.table, this.picker);
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
    this.watchWidth(this.grid.node, () => this.grid.draw());
  }

  /** Everything that changes when a step is added. */
  update() {
    this.subtitle.textContent = this.run.description;
    if (this.measured.length !== this.measuredCharts().length) this.makeCharts();
    this.showStory().catch(() => this.story.replaceChildren());
    this.showFacts();
    this.showNotices();
    this.showKeys();
    this.draw();
    this.showTable();
    this.showPicker();
  }

  /** What the run says so far, told anew when a step was added. */
  async showStory() {
    if (this.told === this.run.lastStep) return;
    this.told = this.run.lastStep;
    const { sentence } = await this.context.source.json(`runs/${this.run.id}/story`);
    this.story.textContent = sentence;
  }

  showFacts() {
    const last = (series) => meanOf(series.slice(-5).map((point) => point.value));
    const lastOf = (name) => last(this.run.series(name));
    const overhead = last(this.run.series("influence overhead", overheadOf));
    const seconds = lastOf("timing_s/step");
    const facts = [
      [fixed(lastOf("critic/rewards/mean"), 2), "reward, last 5"],
      [fixed(lastOf("actor/entropy"), 3), "entropy, nats"],
      [Number.isFinite(overhead) ? `+${fixed(100 * overhead, 0)} %` : MISSING, "tracing overhead"],
      [Number.isFinite(seconds) ? `${fixed(seconds, 2)} s` : MISSING, "per step"],
    ];
    this.facts.replaceChildren(...facts.map(([value, label]) => fact(value, label)));
  }

  showNotices() {
    const notices = [];
    if (!this.run.rows.size) {
      const waiting = this.run.isLive
        ? "The first step is still running; the curves appear by themselves."
        : "metrics.jsonl has no line.";
      notices.push(emptyState("h2", "No metrics yet", waiting));
    }
    for (const problem of this.run.problems ?? []) notices.push(element("p", "notice problem", `Left out: ${problem}`));
    this.notices.replaceChildren(...notices);
  }

  showKeys() {
    this.keys.replaceChildren();
    this.runs.forEach((run, index) => {
      const sample = svgElement(
        "svg",
        { width: 22, height: 8, "aria-hidden": "true" },
        svgElement("path", { d: "M0 4H22", class: `line run-${index % 6}` }),
      );
      const words = [element("span", "mono", run.name), element("span", "dim", run.stateLine())];
      this.keys.append(element("span", "key", sample, ...words));
    });
    const options = SMOOTHING.map((value) => ({ value, label: value === "0" ? "off" : value }));
    this.smoothing = this.choiceOf("Smoothing", "smooth", options, () => this.draw());
    const how = element("span", "key dim wide-only", "Hover to read a step in all charts, click to open it");
    this.keys.append(element("span", "grow"), how, this.smoothing);
  }

  draw() {
    this.grid.draw(Number(this.smooth));
  }

  openStep(step) {
    if (step <= this.run.lastStep) this.context.go("step", { step });
  }

  showTable() {
    /** @type {[string, (row: Record<string, number>) => string][]} */
    const columns = [
      ["Reward", (row) => fixed(row["critic/rewards/mean"], 3)],
      ["Entropy", (row) => fixed(row["actor/entropy"], 3)],
      ["Length", (row) => fixed(row["response_length/mean"], 1)],
      ["Mixed groups", (row) => ratio(row["influence_trace/uid_mixed"], row["influence_trace/uid_total"])],
      ["Δ entropy, measured", (row) => signed(row["entropy_probe/delta_h_measured"], 4)],
      ["predicted", (row) => signed(row["entropy_probe/delta_h_predicted"], 4)],
      ["Tracing", (row) => (overheadOf(row) === undefined ? MISSING : `+${fixed(100 * overheadOf(row), 1)} %`)],
    ];
    const head = element(
      "tr",
      "",
      element("th", "", "Step"),
      ...columns.map(([name]) => element("th", "number", name)),
      element("th", "", element("span", "visually-hidden", "Trace")),
    );
    const body = element("tbody");
    for (const step of this.run.metricSteps.slice(-TABLE_STEPS).reverse()) {
      const row = this.run.rows.get(step);
      const traced = this.run.tracedSteps.includes(step);
      const link = linkTo(this.context.href("step", { step }), "", String(step));
      const remark = traced
        ? ""
        : !this.context.source.isLive
          ? "not in this report"
          : this.run.isLive && step === this.run.lastStep
            ? "trace being written"
            : "not traced";
      const cells = columns.map(([, value]) => element("td", "number", value(row)));
      const onclick = () => this.openStep(step);
      body.append(element("tr", "opens", { onclick }, element("td", "", link), ...cells, element("td", "dim", remark)));
    }
    const caption = element("caption", "visually-hidden", "The last steps of this run");
    this.table.replaceChildren(caption, element("thead", "", head), body);
    this.table.hidden = !body.children.length;
  }

  /** Any metric of the run as a further chart. */
  showPicker() {
    const known = this.picker.querySelector("input")?.value ?? "";
    const names = element("div", "names");
    const list = (filter) => {
      const matching = this.run.metricNames.filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
      names.replaceChildren(...matching.slice(0, MOST_NAMES).map((name) => this.metricToggle(name)));
      if (matching.length > MOST_NAMES)
        names.append(element("span", "dim", `and ${matching.length - MOST_NAMES} more`));
    };
    if (this.picker.contains(document.activeElement)) return;
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
      m: () => this.smoothing.choose(nextOf(SMOOTHING, this.smooth)),
      Escape: () => this.grid.point(null),
    };
  }
}

function ratio(part, whole) {
  return whole === undefined ? MISSING : `${part} / ${whole}`;
}
