// The numbers that a column shows: of single tokens, or of sentences, lines and turns, in which long answers are read;
// and the colour class of every token.

import { CHANNELS } from "../channels.js";
import { levelOf, scaleTop } from "../colours.js";
import { withUnit } from "../format.js";

export const UNITS = ["token", "sentence", "line", "turn"];
/** A sentence ends with its mark and the space after it, a line with its break; as in gradtrace/commands/trace_show.py. */
const ENDS = { sentence: /[.!?…。！？]+["'”’)\]]*(?=\s|$)|\n+/g, line: /\n+/g };

/** Int32Array: the number of the sentence, line or turn (what one author wrote) that each token of a response is in. */
export function unitsOf(response, by) {
  const units = new Int32Array(response.pieces.length);
  if (by === "turn") {
    for (const [index, { start, end }] of (response.segments ?? []).entries()) units.fill(index, start, end);
    return units;
  }
  const texts = response.pieces.map((piece) => piece.text);
  const ends = Array.from(texts.join("").matchAll(ENDS[by]), (match) => match.index + match[0].length);
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
      found[response.start + index] = CHANNELS[channel].adds_up ? sum : sum / count;
    }
  }
  return found;
}

/** What the sentence, line or turn of a token has in the channels that are shown: [{name, text}], nothing for tokens. */
export function unitMetrics(group, by, colourings, token) {
  if (by === "token") return [];
  const shown = colourings.filter(({ channel, values }) => values !== null && channel !== "advantage");
  return shown.map(({ channel, values }) => {
    const style = group.styleOf(channel, Math.abs(values[token]));
    const text = CHANNELS[channel].signed ? style.signed(values[token]) : style.plain(values[token]);
    return { name: `${by}: ${CHANNELS[channel].title}`, text: withUnit(text, style) };
  });
}

/**
 * What a column shows of a channel: float32 of every token, or null where the group has no such channel; the top of the
 * scale for every response, and the one that they share, if any; the class of every token, −5…5 or 0…6.
 * @typedef {{channel: string, values: Float32Array | null, tops: number[], shared: number | null, levels: Int8Array}}
 *   Colouring
 */

/**
 * target: what every token does to one response, instead of the channel's own values.
 * @param {Record<string, string>} chosen scale, by, and the score of influence @returns {Colouring}
 */
export function colouring(group, channel, chosen, target = null) {
  const { scale, by, score } = chosen;
  const values = aggregated(group, channel, target ?? group.values(channel, score), by);
  const look = CHANNELS[channel];
  const levels = new Int8Array(group.size);
  const tops = values === null ? group.responses.map(() => NaN) : topsOf();
  for (const { index, start, end } of values === null ? [] : group.responses)
    for (let token = start; token < end; token++) levels[token] = levelOf(look, values[token], tops[index]);
  const shared = isOfResponse() && tops.length > 1 ? null : (tops[0] ?? NaN);
  return { channel, values, tops, shared, levels };

  /** Advantages are few and constant along a response, so their scale is always the group's largest. */
  function isOfResponse() {
    return scale === "response" && channel !== "advantage";
  }

  function topsOf() {
    if (isOfResponse()) return group.responses.map(({ start, end }) => scaleTop(values.subarray(start, end)));
    const ofStep = scale === "step" && !target && by === "token" ? group.stepTop(channel, score) : null;
    const top = ofStep ?? scaleTop(values);
    return group.responses.map(() => top);
  }
}
