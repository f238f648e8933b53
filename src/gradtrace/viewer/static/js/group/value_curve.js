// V along a response as a small line, with a band of two standard errors.

import { svgElement } from "../dom.js";
import { fixed } from "../format.js";

const WIDTH = 200;
const HEIGHT = 26;
const INSET = 2;

/** An SVG, or null where nothing was measured. `onPick(position)`: a token was pointed at and clicked. */
export function valueCurve(group, response, onPick) {
  const values = group.channels.get("value")?.subarray(response.start, response.end);
  const errors = group.channels.get("value_stderr")?.subarray(response.start, response.end);
  if (!values?.some(Number.isFinite)) return null;
  const [low, high] = group.rewardBounds;
  const x = (place) => INSET + ((WIDTH - 2 * INSET) * place) / Math.max(1, values.length);
  const y = (value) => HEIGHT - INSET - ((HEIGHT - 2 * INSET) * (clamp(value, low, high) - low)) / (high - low || 1);
  const points = [{ place: 0, value: group.promptValue, error: group.promptValueError }];
  for (let at = 0; at < values.length; at++) points.push({ place: at + 1, value: values[at], error: errors[at] });
  const known = points.filter(({ value }) => Number.isFinite(value));
  const corner = ({ place, value }) => `${fixed2(x(place))},${fixed2(y(value))}`;
  const edge = (sign) => known.map(({ place, value, error }) => corner({ place, value: value + sign * 2 * error }));
  const words = `V from ${fixed(known[0].value, 2)} to ${fixed(known.at(-1).value, 2)} along ${response.name}`;
  const onclick = (event) => {
    const box = curve.getBoundingClientRect();
    const place = Math.ceil(((event.clientX - box.left) / box.width) * values.length) - 1;
    onPick(clamp(place, 0, values.length - 1));
  };
  const curve = svgElement(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "value-curve", role: "img", "aria-label": words, onclick },
    { "data-response": response.index },
    svgElement("title", {}, words),
    svgElement("line", { x1: 0, x2: WIDTH, y1: y(low), y2: y(low), class: "base" }),
    svgElement("polygon", { points: [...edge(1), ...edge(-1).reverse()].join(" "), class: "band" }),
    svgElement("polyline", { points: known.map(corner).join(" "), class: "line" }),
  );
  return curve;
}

function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}

function fixed2(value) {
  return Math.round(value * 100) / 100;
}
