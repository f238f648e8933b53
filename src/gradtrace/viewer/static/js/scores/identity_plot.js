// Predicted against measured, with the line on which they agree. Logarithmic where the values span decades.

import { element, setAttributes, svgElement } from "../dom.js";
import { numberStyle } from "../format.js";

const HEIGHT = 250;
const MARGIN = { left: 62, right: 16, top: 14, bottom: 36 };
const DECADES = 8;
/** Above this ratio of the largest to the smallest value a linear scale hides the small ones. */
const WIDE = 8;

class LinearScale {
  constructor(values) {
    const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
    const room = 0.06 * (high - low || 1);
    Object.assign(this, { low: low - room, high: high + room });
  }

  at(value) {
    return (value - this.low) / (this.high - this.low);
  }

  get ticks() {
    const rough = (this.high - this.low) / 4;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    const ticks = [];
    for (let index = Math.ceil(this.low / step); index * step <= this.high; index++) ticks.push(index * step);
    return ticks;
  }
}

/** Of sizes: the sign is the same for all, and said beside the axis. */
class LogScale {
  constructor(values) {
    const sizes = values.map(Math.abs).filter((size) => size > 0);
    const high = Math.max(...sizes);
    const low = Math.max(Math.min(...sizes), high / 10 ** DECADES);
    Object.assign(this, { low: low / 1.6, high: high * 1.6 });
  }

  at(value) {
    const size = Math.max(this.low, Math.min(this.high, Math.abs(value)));
    return Math.log(size / this.low) / Math.log(this.high / this.low);
  }

  get ticks() {
    const ticks = [];
    for (let power = Math.floor(Math.log10(this.low)); power <= Math.log10(this.high); power++)
      for (const factor of [1, 3]) ticks.push(factor * 10 ** power);
    const inside = ticks.filter((tick) => tick >= this.low && tick <= this.high);
    return inside.length > 5 ? inside.filter((tick) => String(tick.toExponential(0)).startsWith("1")) : inside;
  }
}

export class IdentityPlot {
  /** points: [{predicted, measured, error?, label?, ring?, words}] */
  constructor(points, label) {
    this.points = points.filter(({ predicted, measured }) => Number.isFinite(predicted) && Number.isFinite(measured));
    this.svg = setAttributes(svgElement("svg"), { role: "img", "aria-label": label });
    this.node = element("div", "identity-plot", this.svg);
    const values = this.points.flatMap(({ predicted, measured }) => [predicted, measured]);
    const sizes = values.map(Math.abs).filter((size) => size > 0);
    const sameSign = values.every((value) => value > 0) || values.every((value) => value < 0);
    this.isLog = sameSign && Math.max(...sizes) > WIDE * Math.min(...sizes);
    this.falls = values.length > 0 && values[0] < 0;
    const reach = this.points.flatMap(({ predicted, measured, error = 0 }) => [
      predicted,
      measured - error,
      measured + error,
    ]);
    this.scale = values.length ? (this.isLog ? new LogScale(values) : new LinearScale(reach)) : null;
  }

  draw() {
    const width = this.node.clientWidth || 480;
    this.svg.replaceChildren();
    setAttributes(this.svg, { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT });
    if (!this.scale) return;
    const side = Math.min(width - MARGIN.left - MARGIN.right, 2.2 * (HEIGHT - MARGIN.top - MARGIN.bottom));
    const x = (value) => MARGIN.left + this.scale.at(value) * side;
    const y = (value) => MARGIN.top + (1 - this.scale.at(value)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    const sign = this.isLog && this.falls ? "−" : "";
    const text = (tick) => (tick === 0 ? "0" : sign + numberStyle(Math.abs(tick), 1).plain(tick));
    for (const tick of this.scale.ticks) {
      this.svg.append(
        svgElement("line", { x1: MARGIN.left, x2: MARGIN.left + side, y1: y(tick), y2: y(tick), class: "grid" }),
        svgElement("text", { x: MARGIN.left - 7, y: y(tick) + 3.5, class: "axis", "text-anchor": "end" }, text(tick)),
        svgElement("text", { x: x(tick), y: HEIGHT - 18, class: "axis", "text-anchor": "middle" }, text(tick)),
      );
    }
    const { low, high } = this.scale;
    this.svg.append(
      svgElement("line", { x1: x(low), y1: y(low), x2: x(high), y2: y(high), class: "identity-line" }),
      svgElement("text", { x: MARGIN.left, y: 9, class: "axis" }, "measured, nats"),
      svgElement(
        "text",
        { x: MARGIN.left + side, y: HEIGHT - 3, class: "axis", "text-anchor": "end" },
        "predicted, nats",
      ),
    );
    for (const point of this.points) this.svg.append(this.mark(point, x, y));
    if (this.note) this.svg.append(svgElement("text", { x: MARGIN.left, y: HEIGHT - 3, class: "axis" }, this.note));
  }

  mark({ predicted, measured, error, label, ring, words }, x, y) {
    const group = svgElement("g", { class: "identity-mark" }, svgElement("title", {}, words));
    if (error > 0)
      group.append(
        svgElement("line", {
          x1: x(predicted),
          x2: x(predicted),
          y1: y(this.clip(measured, -error)),
          y2: y(this.clip(measured, error)),
          class: "error-bar",
        }),
      );
    group.append(
      svgElement("circle", {
        cx: x(predicted),
        cy: y(measured),
        r: ring ? 5.5 : 4,
        class: ring ? "ring-mark" : "dot run-0",
      }),
    );
    if (label)
      group.append(svgElement("text", { x: x(predicted) + 8, y: y(measured) + 13, class: "axis note" }, label));
    return group;
  }

  /** An error bar that crosses zero ends at the edge of a logarithmic scale. */
  clip(measured, change) {
    const end = measured + change;
    return this.isLog && Math.sign(end) !== Math.sign(measured) ? Math.sign(measured) * this.scale.low : end;
  }
}
