// Predicted against measured, with the line on which they agree. Logarithmic where the values span decades.

import { Frame, LinearScale, LogScale } from "../axes.js";
import { append, axisText, element, svgDot, svgElement, svgLine } from "../dom.js";
import { numberStyle } from "../format.js";

const HEIGHT = 250;
const MARGIN = { left: 62, right: 16, top: 14, bottom: 36 };
const DECADES = 8;
/** Above this ratio of the largest to the smallest value a linear scale hides the small ones. */
const WIDE = 8;

export class IdentityPlot {
  /** points: [{predicted, measured, error?, label?, ring?, words}]; note: a line below the plot. */
  constructor(points, { heading, label, note }) {
    this.heading = heading;
    this.note = note;
    this.points = points.filter(({ predicted, measured }) => Number.isFinite(predicted) && Number.isFinite(measured));
    this.svg = svgElement("svg", { role: "img", "aria-label": label });
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
    this.scale = values.length ? (this.isLog ? logScale(sizes) : linearScale(reach)) : null;
  }

  draw() {
    const width = this.node.clientWidth || 480;
    this.svg.replaceChildren();
    append(this.svg, { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT });
    if (!this.scale) return;
    const side = Math.min(width - MARGIN.left - MARGIN.right, 2.2 * (HEIGHT - MARGIN.top - MARGIN.bottom));
    const frame = new Frame(MARGIN.left + side + MARGIN.right, HEIGHT, MARGIN);
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
  const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
  const room = 0.06 * (high - low || 1);
  return new LinearScale(low - room, high + room);
}

function logScale(sizes) {
  const high = Math.max(...sizes);
  const low = Math.max(Math.min(...sizes), high / 10 ** DECADES);
  return new LogScale(low / 1.6, high * 1.6);
}
