// Charts that share their steps: one crosshair through all of them, a click opens the step.

import { Chart } from "./chart.js";
import { element } from "./dom.js";

/** Steps on the x axis of these runs, the open one first: to its planned end once half of it is done. */
export function stepDomain(runs) {
  const steps = runs.flatMap((run) => run.metricSteps);
  const last = Math.max(1, ...steps);
  const total = runs[0].totalSteps ?? 0;
  const to = runs[0].isLive && total > last && last * 2 >= total ? total : last;
  return { from: Math.min(1, ...steps), to: Math.max(to, 2) };
}

export class ChartGrid {
  constructor(runs, onOpen) {
    this.runs = runs;
    this.onOpen = onOpen;
    this.step = null;
    /** Where the crosshair stays while nothing is pointed at: the step that the page shows. */
    this.rest = null;
    this.smooth = 0;
    this.node = element("div", "charts");
    /** Charts without a value take no place: one line names them all. */
    this.off = element("p", "charts-off");
    this.charts = [];
    this.listen();
  }

  /** specs: see Chart. */
  show(specs) {
    this.charts = specs.map((spec) => new Chart(spec));
    this.node.replaceChildren(...this.charts.map((chart) => chart.node), this.off);
  }

  get domain() {
    return stepDomain(this.runs);
  }

  draw(smooth = this.smooth) {
    this.smooth = smooth;
    for (const chart of this.charts) chart.draw(this.runs, smooth, this.domain);
    const off = this.charts.filter((chart) => chart.whyNot !== null);
    const words = off.map(({ spec, whyNot }) => `${spec.title} (${whyNot})`);
    this.off.textContent = off.length ? `Not drawn: ${words.join(", ")}.` : "";
    this.point(this.step);
  }

  point(step) {
    this.step = step;
    for (const chart of this.charts) chart.point(step);
  }

  listen() {
    const chartOf = (event) => {
      const node = event.target.closest?.(".chart");
      return node && this.charts.find((chart) => chart.node === node && chart.curves?.length);
    };
    this.node.addEventListener("pointermove", (event) => {
      const chart = chartOf(event);
      if (chart) this.point(chart.stepAt(event.clientX));
    });
    this.node.addEventListener("pointerleave", () => this.point(this.rest));
    this.node.addEventListener("click", (event) => {
      const chart = chartOf(event);
      if (chart) this.onOpen(chart.stepAt(event.clientX));
    });
  }
}
