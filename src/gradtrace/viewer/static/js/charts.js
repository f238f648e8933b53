// Axes of every chart, and the charts over training steps: several runs, one crosshair through all charts of a page.

import { append, axisText, element, svgBand, svgDot, svgElement, svgLine, svgPath } from "./dom.js";
import { general } from "./format.js";
import { extent, placeOf } from "./statistics.js";

/** Height and margins of a chart over steps. */
const HEIGHT = 184;
const MARGIN = { left: 46, right: 8, top: 10, bottom: 20 };

/** The smallest round number that is not below `rough`: 1, 2, 2.5 or 5 times a power of ten. */
export function roundStep(rough, factors = [1, 2, 2.5, 5, 10]) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return factors.find((factor) => factor * power >= rough * 0.999) * power;
}

/** Round numbers that cover low…high, about `count` of them. */
function ticksBetween(low, high, count = 4) {
  if (!(high > low)) {
    const spread = Math.abs(low) >= 2 ? 1 : Math.abs(low) / 2 || 1;
    [low, high] = [low - spread, low + spread];
  }
  const step = roundStep((high - low) / count);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

/** Ends of an axis that does not zoom into noise: they are at least a twentieth of the values apart. */
function noCloser(low, high, share = 0.05) {
  const missing = share * Math.max(Math.abs(low), Math.abs(high)) - (high - low);
  return missing > 0 && high > low ? [low - missing / 2, high + missing / 2] : [low, high];
}

/** Round numbers inside low…high; `whole`: integers only. */
export function ticksInside(low, high, count = 4, whole = false) {
  return ticksBetween(low, high, count).filter(
    (tick) => tick >= low && tick <= high && (!whole || Number.isInteger(tick)),
  );
}

export class LinearScale {
  constructor(low, high) {
    this.low = low;
    this.high = high;
  }

  /** 0…1 */
  at(value) {
    return (value - this.low) / (this.high - this.low || 1);
  }

  get ticks() {
    return ticksInside(this.low, this.high);
  }
}

/** A scale of sizes: the sign is the same for all values, and said beside the axis. */
export class LogScale extends LinearScale {
  at(value) {
    const size = Math.max(this.low, Math.min(this.high, Math.abs(value)));
    return Math.log(size / this.low) / Math.log(this.high / this.low);
  }

  get ticks() {
    const ticks = [];
    for (let power = Math.floor(Math.log10(this.low)); power <= Math.log10(this.high); power++)
      for (const factor of [1, 3]) ticks.push(factor * 10 ** power);
    const inside = ticks.filter((tick) => tick >= this.low && tick <= this.high);
    return inside.length > 5 ? inside.filter((tick) => tick.toExponential(0).startsWith("1")) : inside;
  }
}

/** asinh spreads what is near zero and keeps the sign; it is linear below `unit` and logarithmic above. */
export class AsinhScale extends LinearScale {
  constructor(low, high, unit) {
    super(low, high);
    this.unit = unit;
  }

  at(value) {
    const clipped = Math.max(this.low, Math.min(this.high, value));
    return (this.bend(clipped) - this.bend(this.low)) / (this.bend(this.high) - this.bend(this.low));
  }

  inverse(share) {
    return Math.sinh(this.bend(this.low) + share * (this.bend(this.high) - this.bend(this.low))) * this.unit;
  }

  bend(value) {
    return Math.asinh(value / this.unit);
  }

  get ticks() {
    const size = 10 ** Math.floor(Math.log10(this.high));
    const candidates = [size * 5, size * 2, size, size / 2, size / 5, size / 10].filter((tick) => tick <= this.high);
    const kept = [];
    for (const tick of candidates)
      if (!kept.length || Math.abs(this.at(kept.at(-1)) - this.at(tick)) > 0.09) kept.push(tick);
    const positive = kept.filter((tick) => Math.abs(this.at(tick) - this.at(0)) > 0.07);
    return this.low < 0 ? [...positive.map((tick) => -tick), 0, ...positive] : [0, ...positive];
  }
}

/** Values that a linear axis can show together: those that are `times` larger than the middle one are left out. */
function ordinary(values, times = 30) {
  const sizes = values.map(Math.abs).filter((size) => size > 0);
  sizes.sort((a, b) => a - b);
  const limit = sizes.length > 3 ? times * sizes[Math.floor(sizes.length / 2)] : Infinity;
  return values.filter((value) => Math.abs(value) <= limit);
}

/** The plotting area inside its margins. Shares run from 0 to 1: left to right, bottom to top. */
export class Frame {
  constructor(width, height, margin) {
    this.width = width;
    this.height = height;
    this.left = margin.left;
    this.right = width - margin.right;
    this.top = margin.top;
    this.bottom = height - margin.bottom;
  }

  x(share) {
    return this.left + share * (this.right - this.left);
  }

  y(share) {
    return this.bottom - share * (this.bottom - this.top);
  }

  /** The share under a place in pixels; outside of the frame it is below 0 or above 1. */
  shareAt(x, y = 0) {
    return [(x - this.left) / (this.right - this.left), (this.bottom - y) / (this.bottom - this.top)];
  }

  /** Lines across the frame with their numbers at the left, as SVG nodes. */
  rows(ticks, shareOf, text) {
    return ticks.flatMap((tick) => {
      const y = this.y(shareOf(tick));
      const line = svgLine(this.left, y, this.right, y, tick === 0 ? "grid zero" : "grid");
      return [line, axisText(this.left - 7, y + 3.5, tick === 0 ? "0" : text(tick), "end")];
    });
  }
}

/** Ticks share their number of decimals. */
function shortTick(tick, ticks) {
  const step = Math.abs(ticks[1] - ticks[0]);
  if (step < 1e-4 || Math.abs(tick) >= 1e5) return tick.toExponential(1).replace("-", "−").replace("+", "");
  let decimals = 0;
  while (decimals < 6 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-9) decimals += 1;
  return tick.toFixed(decimals).replace("-", "−");
}

/** Of many [x, y] in one column of pixels the first, the lowest, the highest and the last: the same picture, and a
 * curve of 10,000 steps is drawn as fast as one of 1,000. */
function thinned(places) {
  const kept = [];
  for (let from = 0, to = 0; from < places.length; from = to) {
    let [low, high] = [from, from];
    for (; to < places.length && Math.floor(places[to][0]) === Math.floor(places[from][0]); to++) {
      if (places[to][1] < places[low][1]) low = to;
      if (places[to][1] > places[high][1]) high = to;
    }
    const ends = [from, low, high, to - 1].sort((a, b) => a - b);
    for (const at of new Set(ends)) kept.push(places[at]);
  }
  return kept;
}

/** Exponential smoothing of [{step, value}]. */
function smoothed(points, weight) {
  let average = points[0]?.value ?? 0;
  return points.map(({ step, value }) => {
    average = average * weight + value * (1 - weight);
    return { step, value: average };
  });
}

class Chart {
  /** spec: {title, unit, lines: [{label, dashed, points(run), band?(run) → [{step, low, high}]}], includesZero, why,
   * note: words, or what makes them from the open run,
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
    this.ticks = ticksBetween(...noCloser(...extent(this.spec.includesZero ? [0, ...shown] : shown)));
    this.range = new LinearScale(this.ticks[0], this.ticks.at(-1));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.drawAxes();
    for (const curve of [...this.curves].reverse()) this.drawCurve(curve);
    const { note } = this.spec;
    const words = typeof note === "function" ? note(runs[0]) : note;
    if (words) this.svg.append(axisText(this.frame.right, this.frame.bottom - 8, words, "end", "axis note"));
    this.svg.append((this.cross = svgElement("g")));
    this.point(null);
  }

  collect(runs, smooth) {
    const { lines } = this.spec;
    return runs.flatMap((run, index) => {
      const shown = index ? lines.filter(({ dashed }) => !dashed) : lines; // a second kind for every run is illegible
      return shown.map((line) => {
        const raw = line.points(run);
        return {
          index,
          line,
          points: smooth ? smoothed(raw, smooth) : raw,
          band: index === 0 && line.band && !smooth ? line.band(run) : [], // not around a smoothed curve
          raw: smooth && !line.dashed && lines.length === 1 ? raw : [],
        };
      });
    });
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
    const placed = (data, name = "value") => thinned(data.map((each) => [this.x(each.step), this.y(each[name])]));
    const path = (data, kind) => this.svg.append(svgPath(placed(data), kind));
    const own = `run-${index % 6}${line.dashed ? " dashed" : ""}`;
    if (band.length > 1) {
      this.svg.append(svgBand(placed(band, "high"), placed(band, "low"), `chart-band ${own}`));
    }
    if (raw.length > 1) path(raw, `line ${own} raw`);
    if (points.length > 1) path(points, `line ${own}`);
    else for (const { step, value } of points) this.svg.append(svgDot(this.x(step), this.y(value), 2.5, `dot ${own}`));
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
    const x = this.x(step);
    const dots = this.curves.map(({ index, line, points }) => {
      const last = step === null ? points.at(-1) : points[placeOf(points, step, (point) => point.step)];
      const found = step === null || last?.step === step ? last : undefined;
      const text = `${line.label ? `${line.label} ` : ""}${found ? (this.spec.format ?? general)(found.value) : "–"}`;
      const own = `run-${index % 6}`;
      this.values.append(element(index === 0 && !line.dashed ? "b" : "span", line.dashed ? "dim" : own, text));
      return found ? svgDot(x, this.y(found.value), line.dashed ? 2.5 : 4, `dot ${own}`) : null;
    });
    if (step === null) return;
    const half = 8 + 3.4 * String(step).length;
    const box = svgElement("rect", { x: x - half, y: HEIGHT - 16, width: 2 * half, height: 15, rx: 2 });
    const text = svgElement("text", { x, y: HEIGHT - 5 }, String(step));
    const crosshair = svgLine(x, MARGIN.top - 4, x, this.frame.bottom, "crosshair");
    append(this.cross, crosshair, ...dots.reverse(), svgElement("g", { class: "step-flag" }, box, text));
  }
}

/** Charts that share their steps: one crosshair through all of them, a click opens the step. */
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

  /** Steps on the x axis, of all runs: to the planned end of the open one, the first, once half of it is done. */
  get domain() {
    const [open] = this.runs;
    const [from, last] = extent([1, ...this.runs.flatMap((run) => run.metricSteps)]);
    const total = open.total_steps ?? 0;
    const to = open.isLive && total > last && last * 2 >= total ? total : last;
    return { from, to: Math.max(to, 2) };
  }

  draw(smooth = this.smooth) {
    this.smooth = smooth;
    const { domain } = this;
    for (const chart of this.charts) chart.draw(this.runs, smooth, domain);
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
