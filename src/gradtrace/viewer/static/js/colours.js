// From values to colour classes. The top of a scale is the 99th percentile, so that one extreme token cannot
// wash out the rest; class 0 has no fill.

import { largestSize, quantile } from "./statistics.js";

const TOP_QUANTILE = 0.99;

/** @typedef {{signed?: boolean, ramp?: string}} Look whether colours have a sign, else the letter of their ramp */

/** @type {Look} */
export const SIGNED = { signed: true };

/** The top of the scale for these values; 0 where there is nothing to scale. */
export function scaleTop(values) {
  const top = quantile(values.map(Math.abs), TOP_QUANTILE);
  // Where fewer than one in a hundred is non-zero, those few still deserve a colour.
  return top > 0 ? top : largestSize(values.filter(Number.isFinite));
}

/** The class of a value: −5…5 in colours with a sign, else 0…6. @param {Look} look */
export function levelOf({ signed }, value, top) {
  const share = top > 0 && Number.isFinite(value) ? Math.abs(value) / top : 0;
  if (share < (signed ? 0.08 : 0.06)) return 0;
  return signed ? Math.sign(value) * Math.min(5, 1 + Math.floor(share * 5)) : Math.min(6, 1 + Math.floor(share * 6));
}

/** The name of a class: "p3", "n2", "e4"; "" for class 0. @param {Look} look */
export function levelName({ signed, ramp = "e" }, level) {
  if (!level) return "";
  return signed ? (level > 0 ? "p" : "n") + Math.abs(level) : ramp + level;
}

/** The names of all classes from low to high, for a legend. @param {Look} look */
export function rampOf({ signed, ramp = "e" }) {
  if (signed) return ["n5", "n4", "n3", "n2", "n1", "zero", "p1", "p2", "p3", "p4", "p5"];
  return ["zero", ...[1, 2, 3, 4, 5, 6].map((level) => ramp + level)];
}
