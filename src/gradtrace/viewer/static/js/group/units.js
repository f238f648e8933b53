// Sentences, lines and turns: long answers are read in them, so numbers can be shown for them instead of single tokens.

import { CHANNELS } from "../channels.js";
import { numberStyle } from "../format.js";

export const UNITS = ["token", "sentence", "line", "turn"];
const SUMMED = ["influence", "delta_v", "token_grad_share"];
/** A sentence ends with its mark and the space after it, a line with its break; as in gradtrace/trace/units.py. */
const ENDS = { sentence: /[.!?…。！？]+["'”’)\]]*(?=\s|$)|\n+/g, line: /\n+/g };

/** Int32Array: the number of the sentence, line or turn (what one author wrote) that each token of a response is in. */
export function unitsOf(response, by) {
  if (by === "turn") {
    const units = new Int32Array(response.pieces.length);
    for (const [index, { start, end }] of (response.segments ?? []).entries()) units.fill(index, start, end);
    return units;
  }
  const texts = response.pieces.map((piece) => piece.text);
  const whole = texts.join("");
  const ends = Array.from(whole.matchAll(ENDS[by]), (match) => match.index + match[0].length);
  const units = new Int32Array(texts.length);
  let at = 0;
  let unit = 0;
  for (const [index, text] of texts.entries()) {
    while (unit < ends.length && at >= ends[unit]) unit += 1;
    units[index] = unit;
    at += text.length;
  }
  return units;
}

/** The values of a channel with each token's replaced by that of its unit: the sum of what adds up, else the mean. */
export function aggregated(group, channel, values, by) {
  if (by === "token" || values === null) return values;
  const found = new Float32Array(values.length).fill(NaN);
  for (const response of group.responses) {
    const units = unitsOf(response, by);
    const sums = new Map();
    for (const [index, unit] of units.entries()) {
      const value = values[response.start + index];
      const [sum, count] = sums.get(unit) ?? [0, 0];
      if (Number.isFinite(value)) sums.set(unit, [sum + value, count + 1]);
    }
    for (const [index, unit] of units.entries()) {
      const [sum, count] = sums.get(unit) ?? [NaN, 1];
      found[response.start + index] = SUMMED.includes(channel) ? sum : sum / count;
    }
  }
  return found;
}

/** What the sentence, line or turn of a token has in the channels that are shown: [{name, text}], nothing for tokens. */
export function unitMetrics(by, colourings, token) {
  if (by === "token") return [];
  const shown = colourings.filter(({ channel, values }) => values !== null && channel !== "advantage");
  return shown.map(({ channel, values }) => {
    const style = numberStyle(Math.abs(values[token]));
    const text = CHANNELS[channel].signed ? style.signed(values[token]) : style.plain(values[token]);
    return { name: `${by}: ${CHANNELS[channel].title}`, text };
  });
}
