// A line chart over training steps: several runs, one crosshair shared by all charts of the page.

import { Frame, LinearScale, noCloser, ordinary, shortTick, ticksBetween, ticksInside } from "./axes.js";
import { axisText, element, svgDot, svgElement, svgLine, svgPath } from "./dom.js";
import { general } from "./format.js";

const HEIGHT = 184;
const MARGIN = { left: 46, right: 8, top: 10, bottom: 20 };

/** Exponential smoothing of [{step, value}]. */
function smoothed(points, weight) {
  let average = points[0]?.value ?? 0;
  return points.map(({ step, value }) => {
    average = average * weight + value * (1 - weight);
    return { step, value: average };
  });
}

export class Chart {
  /** spec: {title, unit, lines: [{label, dashed, points(run), band?(run) → [{step, low, high}]}], includesZero, why,
   * cuts: a value so large that the others could not be told apart is drawn at the edge, with its number} */
  constructor(spec) {
    this.spec = spec;
    this.values = element("span", "values");
    this.svg = svgElement("svg", { role: "img", "aria-label": `${spec.title}, ${spec.unit}` });
    /** Why there is nothing to draw; null where there is. */
    this.whyNot = null;
    const title = [element("h2", "", spec.title), element("span", "unit", spec.unit)];
    const header = element("header", "", ...title, this.values);
    this.node = element("section", "chart", { "data-chart": spec.key }, header, this.svg);
  }

  /** runs: open one first. smooth: 0…1. domain: {from, to} of steps. */
  draw(runs, smooth, domain) {
    this.node.hidden = false;
    const width = this.svg.getBoundingClientRect().width || 400;
    this.frame = new Frame(width, HEIGHT, MARGIN);
    this.steps = new LinearScale(domain.from, Math.max(domain.to, domain.from + 1));
    this.curves = this.collect(runs, smooth);
    const all = this.curves.flatMap((curve) => [
      ...[...curve.points, ...curve.raw].map((point) => point.value),
      ...curve.band.flatMap(({ low, high }) => [low, high]),
    ]);
    this.svg.replaceChildren();
    this.whyNot = all.length === 0 ? this.spec.why(runs[0]) : null;
    this.node.hidden = this.whyNot !== null;
    if (this.whyNot !== null) return;
    const shown = this.spec.cuts ? ordinary(all) : all;
    const low = Math.min(...shown, ...(this.spec.includesZero ? [0] : []));
    const high = Math.max(...shown, ...(this.spec.includesZero ? [0] : []));
    this.ticks = ticksBetween(...noCloser(low, high));
    this.range = new LinearScale(this.ticks[0], this.ticks.at(-1));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.drawAxes();
    for (const curve of [...this.curves].reverse()) this.drawCurve(curve);
    if (this.spec.note)
      this.svg.append(axisText(this.frame.right, this.frame.bottom - 8, this.spec.note(runs[0]), "end", "axis note"));
    this.svg.append((this.cross = svgElement("g")));
    this.point(null);
  }

  collect(runs, smooth) {
    const curves = [];
    runs.forEach((run, index) => {
      for (const line of this.spec.lines) {
        if (line.dashed && index > 0) continue; // a second kind of line for every run is illegible
        const raw = line.points(run);
        curves.push({
          run,
          index,
          line,
          points: smooth ? smoothed(raw, smooth) : raw,
          band: index === 0 && line.band && !smooth ? line.band(run) : [], // not around a smoothed curve
          raw: smooth && !line.dashed && this.spec.lines.length === 1 ? raw : [],
        });
      }
    });
    return curves;
  }

  x(step) {
    return this.frame.x(this.steps.at(step));
  }

  /** What the axis does not reach is drawn at its end. */
  y(value) {
    return this.frame.y(Math.max(0, Math.min(1, this.range.at(value))));
  }

  /** The step under a pointer, whole. */
  stepAt(clientX) {
    const { low, high } = this.steps;
    const [share] = this.frame.shareAt(clientX - this.svg.getBoundingClientRect().left);
    return Math.max(low, Math.min(high, Math.round(low + share * (high - low))));
  }

  drawAxes() {
    const text = (tick) => (this.spec.tick ?? shortTick)(tick, this.ticks);
    this.svg.append(...this.frame.rows(this.ticks, (tick) => this.range.at(tick), text));
    const steps = ticksInside(this.steps.low, this.steps.high, 5, true);
    steps.forEach((step, index) => {
      const anchor = index === steps.length - 1 && this.x(step) > this.frame.width - 30 ? "end" : "middle";
      this.svg.append(axisText(this.x(step), HEIGHT - 4, String(step), anchor));
    });
  }

  drawCurve({ index, line, points, raw, band }) {
    const path = (data, kind) => {
      const places = data.map(({ step, value }) => [this.x(step), this.y(value)]);
      this.svg.append(svgPath(places, kind));
    };
    const own = `run-${index % 6}`;
    const kind = `line ${own}${line.dashed ? " dashed" : ""}`;
    const corner = (step, value) => `${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`;
    const upper = band.map(({ step, high }) => corner(step, high));
    const lower = [...band].reverse().map(({ step, low }) => corner(step, low));
    const edges = { points: [...upper, ...lower].join(" "), class: `chart-${kind.replace("line", "band")}` };
    if (band.length > 1) this.svg.append(svgElement("polygon", edges));
    if (raw.length > 1) path(raw, `${kind} raw`);
    if (points.length === 1)
      this.svg.append(svgDot(this.x(points[0].step), this.y(points[0].value), 2.5, `dot ${own}`));
    else path(points, kind);
    const { low, high } = this.range;
    for (const { step, value } of points.filter((point) => point.value < low || point.value > high)) {
      const anchor = this.x(step) > (this.frame.left + this.frame.right) / 2 ? "end" : "start";
      const beside = this.x(step) + (anchor === "end" ? -5 : 5);
      const words = `step ${step}: ${general(value)} ${value > high ? "↑" : "↓"}`;
      this.svg.append(axisText(beside, this.y(value) + (value > high ? 8 : -4), words, anchor, "axis off-axis"));
    }
  }

  /** Show the values of a step; null shows the last ones and no crosshair. */
  point(step) {
    if (!this.curves?.length || !this.cross) return;
    this.cross.replaceChildren();
    this.values.replaceChildren();
    for (const curve of this.curves) {
      const found = step === null ? curve.points.at(-1) : curve.points.find((point) => point.step === step);
      const text = `${curve.line.label ? `${curve.line.label} ` : ""}${found ? (this.spec.format ?? general)(found.value) : "–"}`;
      const isMain = curve.index === 0 && !curve.line.dashed;
      const className = curve.line.dashed ? "dim" : `run-${curve.index % 6}`;
      this.values.append(element(isMain ? "b" : "span", className, text));
    }
    if (step === null) return;
    const x = this.x(step);
    this.cross.append(svgLine(x, MARGIN.top - 4, x, HEIGHT - MARGIN.bottom, "crosshair"));
    for (const curve of [...this.curves].reverse()) {
      const found = curve.points.find((point) => point.step === step);
      const size = curve.line.dashed ? 2.5 : 4;
      if (found) this.cross.append(svgDot(x, this.y(found.value), size, `dot run-${curve.index % 6}`));
    }
    const label = String(step);
    const half = 8 + 3.4 * label.length;
    const box = svgElement("rect", { x: x - half, y: HEIGHT - 16, width: 2 * half, height: 15, rx: 2 });
    const text = svgElement("text", { x, y: HEIGHT - 5 }, label);
    this.cross.append(svgElement("g", { class: "step-flag" }, box, text));
  }
}
