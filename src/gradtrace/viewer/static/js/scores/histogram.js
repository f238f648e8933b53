// Scores as bars: kept below, dropped on top of them, zero always an edge, so that a bar has one sign.

import { Frame, roundStep, ticksInside } from "../axes.js";
import { append, axisText, element, svgElement, svgLine } from "../dom.js";
import { numberStyle, plural } from "../format.js";
import { quantile } from "../scales.js";

const BARS = 34;
const HEIGHT = 250;
const MARGIN = { left: 40, right: 10, top: 22, bottom: 34 };

/** [{low, high, members, kept, dropped}] of the rows whose score is finite and not zero. */
export function scoreBins(rows) {
  const scores = rows.map((row) => row.score);
  const low = Math.min(0, quantile(scores, 0.005));
  const high = Math.max(0, quantile(scores, 0.995));
  if (!(high > low)) return [];
  const step = roundStep((high - low) / BARS);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.max(first, Math.ceil(high / step - 1e-9) - 1);
  const bins = [];
  for (let index = first; index <= last; index++)
    bins.push({ low: index * step, high: (index + 1) * step, members: [], kept: 0, dropped: 0 });
  for (const row of rows) {
    const index = Math.max(
      first,
      Math.min(last, row.score > 0 ? Math.ceil(row.score / step) - 1 : Math.floor(row.score / step)),
    );
    const bin = bins[index - first];
    bin.members.push(row);
    bin[row.kept ? "kept" : "dropped"] += 1;
  }
  return bins;
}

export class Histogram {
  constructor(bins, onSelect) {
    this.bins = bins;
    this.onSelect = onSelect;
    this.svg = svgElement("svg", { role: "group", "aria-label": "Histogram of scores" });
    this.node = element("div", "histogram", this.svg);
    this.top = Math.max(1, ...bins.map((bin) => bin.members.length));
    this.style = numberStyle(Math.max(...bins.map((bin) => Math.max(Math.abs(bin.low), Math.abs(bin.high))), 0), 2);
  }

  /** What a bar stands for, in words. The outermost bars hold what lies beyond them as well. */
  words(index) {
    const { low, high } = this.bins[index];
    if (index === 0 && low < 0) return `score below ${this.style.signed(high)}`;
    if (index === this.bins.length - 1 && high > 0) return `score above ${this.style.signed(low)}`;
    return `score ${this.style.signed(low)} to ${this.style.signed(high)}`;
  }

  draw(selected) {
    const width = this.node.clientWidth || 560;
    const frame = new Frame(width, HEIGHT, MARGIN);
    const unit = (frame.right - frame.left) / this.bins.length;
    const y = (count) => frame.y(count / this.top);
    this.svg.replaceChildren(hatches());
    append(
      this.svg,
      { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT },
      ...frame.rows(ticksInside(0, this.top, 4, true), (count) => count / this.top, String),
      ...this.bins.map((bin, index) => this.bar(bin, index, frame.left + index * unit, unit, y, selected)),
    );
    this.drawEdges(unit);
  }

  bar(bin, index, x, unit, y, selected) {
    const sign = bin.low >= 0 ? "p4" : "n4";
    const words = `${this.words(index)}: ${plural(bin.kept, "response")} kept, ${bin.dropped} dropped`;
    const isChosen = selected === index;
    const count = bin.members.length;
    const choose = () => count && this.onSelect(isChosen ? null : index);
    const onkeydown = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      choose();
    };
    const box = (left, width, top, bottom, more) =>
      svgElement("rect", { x: left, y: top, width, height: bottom - top, ...more });
    const [floor, middle, ceiling] = [y(0), y(bin.kept), y(bin.kept + bin.dropped)];
    return svgElement(
      "g",
      { class: `score-bar ${sign}${isChosen ? " chosen" : ""}`, role: "button", "data-bar": index },
      { tabindex: count ? 0 : -1, "aria-label": words, "aria-pressed": String(isChosen), onclick: choose, onkeydown },
      svgElement("title", words),
      box(x, unit, MARGIN.top - 14, HEIGHT - MARGIN.bottom, { class: "touch" }),
      box(x + 1, Math.max(1, unit - 2), middle, floor, { class: "kept" }),
      box(x + 1, Math.max(1, unit - 2), ceiling, middle, { class: "dropped", fill: `url(#hatch-${sign})` }),
      isChosen ? axisText(x + unit / 2, y(count) - 5, String(count), "middle", "bar-count") : null,
    );
  }

  /** Numbers under some edges, zero always among them. */
  drawEdges(unit) {
    const edges = [...this.bins.map((bin) => bin.low), this.bins.at(-1).high];
    const zero = edges.findIndex((edge) => Math.abs(edge) < 1e-12 * Math.abs(edges.at(-1) - edges[0]) || edge === 0);
    const every = Math.max(1, Math.ceil(64 / unit));
    edges.forEach((edge, index) => {
      const x = MARGIN.left + index * unit;
      if (index === zero) this.svg.append(svgLine(x, MARGIN.top - 12, x, HEIGHT - MARGIN.bottom, "zero-line"));
      if ((index - zero) % every !== 0) return;
      const text = index === zero ? "0" : this.style.signed(edge);
      this.svg.append(axisText(x, HEIGHT - MARGIN.bottom + 15, text, "middle"));
    });
  }
}

/** Dropped is hatched: kept and dropped differ without colour. */
function hatches() {
  const pattern = (name) =>
    svgElement(
      "pattern",
      { id: `hatch-${name}`, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svgElement("line", { x1: 0, y1: 0, x2: 0, y2: 5, class: `hatch ${name}` }),
    );
  return svgElement("defs", {}, pattern("p4"), pattern("n4"));
}
