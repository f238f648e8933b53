// Entropy × influence, one mark per token, on two canvases: the points, and the brush that moves over them.

import { AsinhScale, Frame } from "./axes.js";
import { cssColours, element, fitCanvas } from "./dom.js";
import { numberStyle } from "./format.js";
import { quantile, signedClass } from "./scales.js";

const MARGIN = { left: 52, right: 62, top: 46, bottom: 36 };
const BINS = 48;
const SMALLEST_BRUSH = 4;

export class Scatter {
  /** points: {entropy, influence: float32, accepted(index)}; brush: {entropy: [low, high], influence: [low, high]} or null. */
  constructor(points, onBrush) {
    this.points = points;
    this.onBrush = onBrush;
    this.brush = null;
    const words = "Scatter of entropy against influence, one mark per token. The fields below select a range.";
    this.canvas = element("canvas", "", { role: "img", "aria-label": words });
    this.cover = element("canvas", "brush", { "aria-hidden": "true" });
    this.node = element("div", "plot", this.canvas, this.cover);
    const top = (values, q, otherwise) => quantile(values.map(Math.abs), q) || otherwise;
    this.top = top(points.influence, 0.99, 1);
    const reach = Math.max(top(points.influence, 0.999, 1) * 1.1, 1e-12);
    this.horizontal = new AsinhScale(
      0,
      top(points.entropy, 0.999, 1) * 1.05,
      Math.max(top(points.entropy, 0.9, 1) / 4, 1e-6),
    );
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
    this.frame = new Frame(this.width, this.height, MARGIN);
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
    const { right, bottom } = this.frame;
    const note = (text, x, y, align) => write(context, text, x, y, align, colours.ink3);
    const style = numberStyle(this.vertical.high, 2);
    for (const tick of this.horizontal.ticks) {
      line(this.x(tick), MARGIN.top, this.x(tick), bottom, colours.line);
      note(String(Number(tick.toPrecision(2))), this.x(tick), bottom + 15, "center");
    }
    for (const tick of this.vertical.ticks) {
      line(MARGIN.left, this.y(tick), right, this.y(tick), tick === 0 ? colours.line2 : colours.line);
      note(tick === 0 ? "0" : style.signed(tick), MARGIN.left - 7, this.y(tick) + 3.5, "right");
    }
    note("entropy, nats (asinh scale)", right, this.height - 4, "right");
    note("influence (asinh scale)", MARGIN.left, 10, "left");
    const key = "filled: in an accepted response   ring: in a rejected one";
    if (this.width > 460) note(key, MARGIN.left, this.height - 4, "left");
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
      if (isChosen && signedClass(influence[index], this.top) !== 0) chosen.push(index);
      else drawAt(index, colours.line2, isChosen ? 0.6 : 0.35);
    }
    chosen.sort((a, b) => Math.abs(influence[a]) - Math.abs(influence[b]));
    for (const index of chosen)
      drawAt(
        index,
        influence[index] > 0 ? colours.p4 : colours.n4,
        0.35 + 0.6 * Math.min(1, Math.abs(influence[index]) / this.top),
      );
    context.globalAlpha = 1;
    context.lineWidth = 1;
  }

  /** How many tokens, all and chosen, along both axes (logarithmic). */
  drawHistograms(context, colours) {
    const counts = () => ({ all: new Float64Array(BINS), chosen: new Float64Array(BINS) });
    const [across, down] = [counts(), counts()];
    const { entropy, influence } = this.points;
    for (let index = 0; index < entropy.length; index++) {
      const h = Math.min(BINS - 1, Math.floor(this.horizontal.at(entropy[index]) * BINS));
      const v = Math.min(BINS - 1, Math.floor((1 - this.vertical.at(influence[index])) * BINS));
      const isChosen = this.contains(index);
      const tally = (bins, bin) => {
        if (!(bin >= 0)) return;
        bins.all[bin] += 1;
        if (isChosen) bins.chosen[bin] += 1;
      };
      tally(across, h);
      tally(down, v);
    }
    const bar = (count, most, length) => (most ? (Math.log1p(count) / Math.log1p(most)) * length : 0);
    const { left, right, top, bottom } = this.frame;
    const [wide, high] = [(right - left) / BINS, (bottom - top) / BINS];
    const [mostAcross, mostDown] = [Math.max(...across.all), Math.max(...down.all)];
    for (let bin = 0; bin < BINS; bin++) {
      for (const [which, horizontalColour, verticalColour] of [
        ["all", colours.line, colours.line],
        ["chosen", colours.e3, bin < BINS / 2 ? colours.p3 : colours.n3],
      ]) {
        const [upward, sideward] = [bar(across[which][bin], mostAcross, 24), bar(down[which][bin], mostDown, 44)];
        context.fillStyle = horizontalColour;
        context.fillRect(MARGIN.left + bin * wide, MARGIN.top - 4 - upward, wide - 1, upward);
        context.fillStyle = verticalColour;
        context.fillRect(this.width - MARGIN.right + 5, MARGIN.top + bin * high, sideward, high - 1);
      }
    }
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

function write(context, text, x, y, align, colour) {
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(text, x, y);
}
