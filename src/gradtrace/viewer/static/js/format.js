// Numbers as people read them: a real minus sign, a fixed number of decimals inside one view.

const SHORTEST_SHARED_START = 24;
const MINUS = "\u2212";
export const MISSING = "–";

export function fixed(value, decimals = 2) {
  if (!Number.isFinite(value)) return MISSING;
  const text = Math.abs(value).toFixed(decimals);
  return (value < 0 && Number(text) !== 0 ? MINUS : "") + text;
}

/** A number with its sign, plus included; a value that rounds to zero has none. */
export function signed(value, decimals = 2) {
  if (!Number.isFinite(value)) return MISSING;
  const text = Math.abs(value).toFixed(decimals);
  return (Number(text) === 0 ? "" : value < 0 ? MINUS : "+") + text;
}

/** Influence has no natural size: the decimals follow the largest value in view, and tiny or huge scales use exponents. */
export function numberStyle(top, digits = 3) {
  const size = Math.abs(top);
  const exponential = size > 0 && (size < 1e-3 || size >= 1e6);
  const decimals = size > 0 ? Math.max(0, Math.min(6, digits - 1 - Math.floor(Math.log10(size)))) : 2;
  const shown = (usual, plus) => (value) => {
    if (!Number.isFinite(value) || !exponential) return usual(value, decimals);
    return value === 0 ? "0" : (value < 0 ? MINUS : plus) + exponent(Math.abs(value), digits - 1);
  };
  return { plain: shown(fixed, ""), signed: shown(signed, "+") };
}

function exponent(value, decimals = 2) {
  return value
    .toExponential(decimals)
    .replace("e-", "e" + MINUS)
    .replace("e+", "e");
}

/** A number of unknown size, such as a metric, with about four significant digits. */
export function general(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return MISSING;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return (value < 0 ? MINUS : "") + exponent(size);
  const decimals = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return fixed(value, Number.isInteger(value) ? 0 : decimals);
}

export function count(value) {
  return value.toLocaleString("en-US");
}

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function ago(seconds) {
  if (seconds < 5) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

/** How many characters all texts have in common at their beginning; 0 if so few that they are worth showing. */
export function sharedStart(texts) {
  if (texts.length < 2) return 0;
  let length = Math.min(...texts.map((text) => text.length));
  for (const text of texts) {
    let shared = 0;
    while (shared < length && text[shared] === texts[0][shared]) shared += 1;
    length = shared;
  }
  return length >= SHORTEST_SHARED_START ? length : 0;
}
