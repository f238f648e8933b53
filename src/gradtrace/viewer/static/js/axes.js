// Axes of every chart: round numbers, scales from values to 0…1, and the frame that turns these into pixels.

import { axisText, svgLine } from "./dom.js";

/** The smallest round number that is not below `rough`: 1, 2, 2.5 or 5 times a power of ten. */
export function roundStep(rough, factors = [1, 2, 2.5, 5, 10]) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return factors.find((factor) => factor * power >= rough * 0.999) * power;
}

/** Round numbers that cover low…high, about `count` of them. */
export function ticksBetween(low, high, count = 4) {
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
export function noCloser(low, high, share = 0.05) {
  const missing = share * Math.max(Math.abs(low), Math.abs(high)) - (high - low);
  return missing > 0 && high > low ? [low - missing / 2, high + missing / 2] : [low, high];
}

/** Round numbers inside low…high; `whole`: integers only. */
export function ticksInside(low, high, count = 4, whole = false) {
  return ticksBetween(low, high, count).filter(
    (tick) => tick >= low && tick <= high && (!whole || Number.isInteger(tick)),
  );
}

class Scale {
  constructor(low, high) {
    this.low = low;
    this.high = high;
  }
}

export class LinearScale extends Scale {
  /** 0…1 */
  at(value) {
    return (value - this.low) / (this.high - this.low);
  }

  get ticks() {
    return ticksInside(this.low, this.high);
  }
}

/** A scale of sizes: the sign is the same for all values, and said beside the axis. */
export class LogScale extends Scale {
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
export class AsinhScale extends Scale {
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
export function ordinary(values, times = 30) {
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
    this.margin = margin;
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
export function shortTick(tick, ticks) {
  const step = Math.abs(ticks[1] - ticks[0]);
  if (step < 1e-4 || Math.abs(tick) >= 1e5) return tick.toExponential(1).replace("-", "−").replace("+", "");
  let decimals = 0;
  while (decimals < 6 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-9) decimals += 1;
  return tick.toFixed(decimals).replace("-", "−");
}
