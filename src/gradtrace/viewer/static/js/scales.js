// From values to colour classes. The top of a scale is the 99th percentile, so that one extreme token cannot
// wash out the rest; class 0 has no fill.

const TOP_QUANTILE = 0.99;
const UNSIGNED_CLASSES = 6;
const SIGNED_CLASSES = 5;

export function quantile(values, q) {
  const sorted = Float64Array.from(values).filter(Number.isFinite).sort();
  if (!sorted.length) return NaN;
  const at = (sorted.length - 1) * q;
  const below = Math.floor(at);
  const above = Math.min(sorted.length - 1, below + 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (at - below);
}

/** The top of the scale for these values; 0 where there is nothing to scale. */
export function scaleTop(values) {
  const top = quantile(values.map(Math.abs), TOP_QUANTILE);
  if (top > 0) return top;
  const largest = values.reduce((most, value) => (Number.isFinite(value) ? Math.max(most, Math.abs(value)) : most), 0);
  return largest; // fewer than one in a hundred is non-zero: those few still deserve a colour
}

/** 0…6 */
export function unsignedClass(value, top) {
  const share = Math.abs(value) / top;
  return share >= 0.06 ? Math.min(UNSIGNED_CLASSES, 1 + Math.floor(share * UNSIGNED_CLASSES)) : 0;
}

/** −5…5 */
export function signedClass(value, top) {
  const share = Math.abs(value) / top;
  return share >= 0.08 ? Math.sign(value) * Math.min(SIGNED_CLASSES, 1 + Math.floor(share * SIGNED_CLASSES)) : 0;
}

/** "p3", "n2", "" for class 0. */
export function signedClassName(level) {
  return level > 0 ? `p${level}` : level < 0 ? `n${-level}` : "";
}

export function unsignedClassName(ramp, level) {
  return level ? ramp + level : "";
}

/** Mean of the finite values; NaN where there is none. */
export function meanOf(values) {
  const finite = Array.from(values).filter(Number.isFinite);
  return finite.length ? finite.reduce((sum, value) => sum + value, 0) / finite.length : NaN;
}

/** Where each of several parts begins that follow one another, by their lengths. */
export function startsOf(lengths) {
  let end = 0;
  return lengths.map((length) => (end += length) - length);
}

/** The place of the last of these ascending numbers that is not above `value`. */
export function placeOf(starts, value) {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}
