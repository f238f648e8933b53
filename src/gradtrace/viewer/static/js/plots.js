// Plots of one step: entropy × influence of every token, scores as bars, and predicted against measured values.

import { AsinhScale, Frame, LinearScale, LogScale, roundStep, ticksInside } from "./charts.js";
import { SIGNED, levelOf } from "./colours.js";
import { append, axisText, cssColours, element, fitCanvas, svgDot, svgElement, svgLine } from "./dom.js";
import { numberStyle, plural, scoreStyle } from "./format.js";
import { extent, largestSize, quantile } from "./statistics.js";

const SCATTER_MARGIN = { left: 52, right: 62, top: 46, bottom: 36 };
const BINS = 48;
const SMALLEST_BRUSH = 4;

const HEIGHT = 250;
const BARS = 34;
const BAR_MARGIN = { left: 40, right: 10, top: 22, bottom: 34 };
const IDENTITY_MARGIN = { left: 62, right: 16, top: 14, bottom: 36 };
const DECADES = 8;
/** Above this ratio of the largest to the smallest value a linear scale hides the small ones. */
const WIDE = 8;

/** Entropy × influence, one mark per token, on two canvases: the points, and the brush that moves over them. */
export class Scatter {
  /** points: {entropy, influence: float32, accepted(index)}; unit: of influence; brush: {entropy: [low, high],
   * influence: [low, high]} or null. */
  constructor(points, unit, onBrush) {
    this.points = points;
    this.unit = unit;
    this.onBrush = onBrush;
    this.brush = null;
    const words = "Scatter of entropy against influence, one mark per token. The fields below select a range.";
    this.canvas = element("canvas", "", { role: "img", "aria-label": words });
    this.cover = element("canvas", "brush", { "aria-hidden": "true" });
    this.node = element("div", "plot", this.canvas, this.cover);
    const top = (values, q) => quantile(values.map(Math.abs), q) || 1;
    this.top = top(points.influence, 0.99);
    const reach = Math.max(top(points.influence, 0.999) * 1.1, 1e-12);
    const step = Math.max(top(points.entropy, 0.9) / 4, 1e-6);
    this.horizontal = new AsinhScale(0, top(points.entropy, 0.999) * 1.05, step);
    this.vertical = new AsinhScale(-reach, reach, reach / 12);
    this.listen();
  }

  x(entropy) {
    return this.frame.x(this.horizontal.at(entropy));
  }

  y(influence) {
    return this.frame.y(this.vertical.at(influence));
  }

  contains(index) {
    if (!this.brush) return true;
    const { entropy, influence } = this.brush;
    const [h, v] = [this.points.entropy[index], this.points.influence[index]];
    return h >= entropy[0] && h <= entropy[1] && v >= influence[0] && v <= influence[1];
  }

  draw(brush = this.brush) {
    this.brush = brush;
    this.width = this.node.clientWidth;
    if (!this.width) return;
    this.height = Math.round(Math.max(320, Math.min(this.width * 0.94, innerHeight - 260)));
    this.frame = new Frame(this.width, this.height, SCATTER_MARGIN);
    const context = fitCanvas(this.canvas, this.width, this.height);
    fitCanvas(this.cover, this.width, this.height);
    const colours = cssColours("line", "line2", "ink", "ink3", "p3", "p4", "n3", "n4", "e3", "sans");
    this.drawAxes(context, colours);
    this.drawPoints(context, colours);
    this.drawHistograms(context, colours);
    this.drawBrush(brush);
  }

  drawAxes(context, colours) {
    context.font = `10.5px ${colours.sans}`;
    const line = (x1, y1, x2, y2, colour) => {
      context.strokeStyle = colour;
      context.beginPath();
      context.moveTo(Math.round(x1) + 0.5, Math.round(y1) + 0.5);
      context.lineTo(Math.round(x2) + 0.5, Math.round(y2) + 0.5);
      context.stroke();
    };
    const { left, right, top, bottom } = this.frame;
    const note = (text, x, y, align) => {
      context.fillStyle = colours.ink3;
      context.textAlign = align;
      context.fillText(text, x, y);
    };
    const style = scoreStyle(this.unit, this.vertical.high, 2);
    for (const tick of this.horizontal.ticks) {
      line(this.x(tick), top, this.x(tick), bottom, colours.line);
      note(String(Number(tick.toPrecision(2))), this.x(tick), bottom + 15, "center");
    }
    for (const tick of this.vertical.ticks) {
      line(left, this.y(tick), right, this.y(tick), tick === 0 ? colours.line2 : colours.line);
      note(tick === 0 ? "0" : style.signed(tick), left - 7, this.y(tick) + 3.5, "right");
    }
    note("entropy, nats (asinh scale)", right, this.height - 4, "right");
    note(`influence${style.unit ? `, ${style.unit}` : ""} (asinh scale)`, left, 10, "left");
    const key = "filled: in an accepted response   ring: in a rejected one";
    if (this.width > 460) note(key, left, this.height - 4, "left");
  }

  /** Grey first, then the chosen ones by strength, so that what matters lies on top. */
  drawPoints(context, colours) {
    const { entropy, influence } = this.points;
    const chosen = [];
    const drawAt = (index, colour, alpha) => {
      context.globalAlpha = alpha;
      context.beginPath();
      context.arc(this.x(entropy[index]), this.y(influence[index]), 2, 0, 7);
      if (this.points.accepted(index)) {
        context.fillStyle = colour;
        context.fill();
      } else {
        context.strokeStyle = colour;
        context.lineWidth = 0.9;
        context.stroke();
      }
    };
    for (let index = 0; index < entropy.length; index++) {
      if (!Number.isFinite(entropy[index]) || !Number.isFinite(influence[index])) continue;
      const isChosen = this.contains(index);
      if (isChosen && levelOf(SIGNED, influence[index], this.top)) chosen.push(index);
      else drawAt(index, colours.line2, isChosen ? 0.6 : 0.35);
    }
    chosen.sort((a, b) => Math.abs(influence[a]) - Math.abs(influence[b]));
    for (const index of chosen) {
      const strength = Math.min(1, Math.abs(influence[index]) / this.top);
      drawAt(index, influence[index] > 0 ? colours.p4 : colours.n4, 0.35 + 0.6 * strength);
    }
    context.globalAlpha = 1;
    context.lineWidth = 1;
  }

  /** How many tokens, all and chosen, above the plot and to its right (logarithmic). */
  drawHistograms(context, colours) {
    const { left, right, top, bottom } = this.frame;
    const [wide, high] = [(right - left) / BINS, (bottom - top) / BINS];
    const { entropy, influence } = this.points;
    const across = (index) => this.horizontal.at(entropy[index]);
    this.drawHistogram(across, 24, (bin, isChosen, length) => {
      context.fillStyle = isChosen ? colours.e3 : colours.line;
      context.fillRect(left + bin * wide, top - 4 - length, wide - 1, length);
    });
    const down = (index) => 1 - this.vertical.at(influence[index]);
    this.drawHistogram(down, 44, (bin, isChosen, length) => {
      context.fillStyle = !isChosen ? colours.line : bin < BINS / 2 ? colours.p3 : colours.n3;
      context.fillRect(right + 5, top + bin * high, length, high - 1);
    });
  }

  /** Bars of the tokens by what `shareOf` an index is, 0…1; the longest bar has the length `longest`. */
  drawHistogram(shareOf, longest, draw) {
    const counts = [new Float64Array(BINS), new Float64Array(BINS)];
    for (let index = 0; index < this.points.entropy.length; index++) {
      const bin = Math.min(BINS - 1, Math.floor(shareOf(index) * BINS));
      if (!(bin >= 0)) continue;
      counts[0][bin] += 1;
      if (this.contains(index)) counts[1][bin] += 1;
    }
    const most = Math.log1p(largestSize(counts[0])) || 1;
    for (const which of [0, 1])
      for (let bin = 0; bin < BINS; bin++) draw(bin, which === 1, (Math.log1p(counts[which][bin]) / most) * longest);
  }

  drawBrush(brush) {
    const context = this.cover.getContext("2d");
    context.clearRect(0, 0, this.width, this.height);
    if (!brush) return;
    const { ink } = cssColours("ink");
    const [left, top] = [this.x(brush.entropy[0]), this.y(brush.influence[1])];
    const [width, height] = [this.x(brush.entropy[1]) - left, this.y(brush.influence[0]) - top];
    context.strokeStyle = context.fillStyle = ink;
    context.lineWidth = 1.5;
    context.strokeRect(left, top, width, height);
    context.globalAlpha = 0.04;
    context.fillRect(left, top, width, height);
    context.globalAlpha = 1;
  }

  /** The range under two corners given in pixels. */
  rangeOf(from, to) {
    const share = ({ x, y }) => this.frame.shareAt(x, y).map((each) => Math.max(0, Math.min(1, each)));
    const [a, b] = [share(from), share(to)];
    const range = (scale, one, other) => [scale.inverse(Math.min(one, other)), scale.inverse(Math.max(one, other))];
    return { entropy: range(this.horizontal, a[0], b[0]), influence: range(this.vertical, a[1], b[1]) };
  }

  listen() {
    let start = null;
    const place = (event) => ({ x: event.offsetX, y: event.offsetY });
    this.cover.addEventListener("pointerdown", (event) => {
      start = place(event);
      this.cover.setPointerCapture(event.pointerId);
    });
    this.cover.addEventListener("pointermove", (event) => start && this.drawBrush(this.rangeOf(start, place(event))));
    this.cover.addEventListener("pointerup", (event) => {
      if (!start) return;
      const end = place(event);
      const isDrag = Math.abs(end.x - start.x) > SMALLEST_BRUSH && Math.abs(end.y - start.y) > SMALLEST_BRUSH;
      const brush = isDrag ? this.rangeOf(start, end) : null;
      start = null;
      this.onBrush(brush);
    });
  }
}

/** [{low, high, members, kept, dropped}] of the rows whose score is finite and not zero. */
export function scoreBins(rows) {
  const scores = rows.map((row) => row.score);
  const low = Math.min(0, quantile(scores, 0.005));
  const high = Math.max(0, quantile(scores, 0.995));
  if (!(high > low)) return [];
  const step = roundStep((high - low) / BARS);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.max(first, Math.ceil(high / step - 1e-9) - 1);
  const bins = Array.from({ length: last - first + 1 }, (_, at) => {
    const index = first + at;
    return { low: index * step, high: (index + 1) * step, members: [], kept: 0, dropped: 0 };
  });
  for (const row of rows) {
    const index = row.score > 0 ? Math.ceil(row.score / step) - 1 : Math.floor(row.score / step);
    const bin = bins[Math.max(first, Math.min(last, index)) - first];
    bin.members.push(row);
    bin[row.kept ? "kept" : "dropped"] += 1;
  }
  return bins;
}

/** Scores as bars: kept below, dropped on top of them, zero always an edge, so that a bar has one sign. */
export class Histogram {
  constructor(bins, onSelect) {
    this.bins = bins;
    this.onSelect = onSelect;
    this.svg = svgElement("svg", { role: "group", "aria-label": "Histogram of scores" });
    this.node = element("div", "histogram", this.svg);
    this.top = largestSize(bins.map((bin) => bin.members.length));
    this.style = numberStyle(largestSize(bins.flatMap((bin) => [bin.low, bin.high])), 2);
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
    const frame = new Frame(width, HEIGHT, BAR_MARGIN);
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
    const [floor, middle, ceiling] = [y(0), y(bin.kept), y(count)];
    return svgElement(
      "g",
      { class: `score-bar ${sign}${isChosen ? " chosen" : ""}`, role: "button", "data-bar": index },
      { tabindex: count ? 0 : -1, "aria-label": words, "aria-pressed": String(isChosen), onclick: choose, onkeydown },
      svgElement("title", words),
      box(x, unit, BAR_MARGIN.top - 14, HEIGHT - BAR_MARGIN.bottom, { class: "touch" }),
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
      const x = BAR_MARGIN.left + index * unit;
      if (index === zero) this.svg.append(svgLine(x, BAR_MARGIN.top - 12, x, HEIGHT - BAR_MARGIN.bottom, "zero-line"));
      if ((index - zero) % every !== 0) return;
      const text = index === zero ? "0" : this.style.signed(edge);
      this.svg.append(axisText(x, HEIGHT - BAR_MARGIN.bottom + 15, text, "middle"));
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

/** Predicted against measured, with the line on which they agree. Logarithmic where the values span decades. */
export class IdentityPlot {
  /** points: [{predicted, measured, error?, label?, ring?, words}]; note: a line below the plot. */
  constructor(points, { heading, label, note }) {
    this.heading = heading;
    this.note = note;
    this.points = points.filter(({ predicted, measured }) => Number.isFinite(predicted) && Number.isFinite(measured));
    this.svg = svgElement("svg", { role: "img", "aria-label": label });
    this.node = element("div", "identity-plot", this.svg);
    const values = this.points.flatMap(({ predicted, measured }) => [predicted, measured]);
    const [smallest, largest] = extent(values.map(Math.abs));
    const sameSign = values.every((value) => value > 0) || values.every((value) => value < 0);
    this.isLog = sameSign && largest > WIDE * smallest;
    this.falls = values[0] < 0;
    const ends = this.points.flatMap(({ measured, error = 0 }) => [measured - error, measured + error]);
    this.scale = this.isLog ? logScale(smallest, largest) : linearScale([...values, ...ends]);
  }

  draw() {
    const width = this.node.clientWidth || 480;
    this.svg.replaceChildren();
    append(this.svg, { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT });
    if (!this.points.length) return;
    const { left, right, top, bottom } = IDENTITY_MARGIN;
    const side = Math.min(width - left - right, 2.2 * (HEIGHT - top - bottom));
    const frame = new Frame(left + side + right, HEIGHT, IDENTITY_MARGIN);
    const share = (value) => this.scale.at(value);
    const [x, y] = [(value) => frame.x(share(value)), (value) => frame.y(share(value))];
    const sign = this.isLog && this.falls ? "−" : "";
    const text = (tick) => (tick === 0 ? "0" : sign + numberStyle(Math.abs(tick), 1).plain(tick));
    const { low, high, ticks } = this.scale;
    this.svg.append(
      ...frame.rows(ticks, share, text),
      ...ticks.map((tick) => axisText(x(tick), HEIGHT - 18, text(tick), "middle")),
      svgLine(x(low), y(low), x(high), y(high), "identity-line"),
      axisText(frame.left, 9, "measured, nats"),
      axisText(frame.right, HEIGHT - 3, "predicted, nats", "end"),
      axisText(frame.left, HEIGHT - 3, this.note),
    );
    for (const point of this.points) this.svg.append(this.mark(point, x, y));
  }

  mark({ predicted, measured, error, label, ring, words }, x, y) {
    const group = svgElement("g", { class: "identity-mark" }, svgElement("title", words));
    if (error > 0) {
      const [low, high] = [this.clip(measured, -error), this.clip(measured, error)];
      group.append(svgLine(x(predicted), y(low), x(predicted), y(high), "error-bar"));
    }
    group.append(svgDot(x(predicted), y(measured), ring ? 5.5 : 4, ring ? "ring-mark" : "dot run-0"));
    if (label) group.append(axisText(x(predicted) + 8, y(measured) + 13, label, "start", "axis note"));
    return group;
  }

  /** An error bar that crosses zero ends at the edge of a logarithmic scale. */
  clip(measured, change) {
    const end = measured + change;
    return this.isLog && Math.sign(end) !== Math.sign(measured) ? Math.sign(measured) * this.scale.low : end;
  }
}

/** Zero and all values, with a little room around them. */
function linearScale(values) {
  const [low, high] = extent([0, ...values]);
  const room = 0.06 * (high - low || 1);
  return new LinearScale(low - room, high + room);
}

function logScale(smallest, largest) {
  return new LogScale(Math.max(smallest, largest / 10 ** DECADES) / 1.6, largest * 1.6);
}
