// Which colour class every token of the group has, for the channel that a column (a slot) shows.

import { classOf } from "../channels.js";
import { scaleTop } from "../scales.js";
import { aggregated } from "./units.js";

/**
 * {values, tops, levels}: float32 of every token, top of the scale for every response, class −5…6 of every token.
 * values is null where the group has no such channel.
 */
export function colouring(group, channel, options) {
  const own = options.targetValues ?? group.values(channel, options.credit);
  const values = aggregated(group, channel, own, options.by);
  const levels = new Int8Array(group.size);
  if (values === null) return { channel, values, tops: group.responses.map(() => NaN), levels };
  const tops = topsOf(group, channel, values, options);
  for (const response of group.responses) {
    const top = tops[response.index];
    for (let token = response.start; token < response.end; token++)
      levels[token] = classOf(channel, values[token], top);
  }
  return { channel, values, tops, levels };
}

/** Advantages are few and constant along a response, so their scale is always the group's largest. */
function topsOf(group, channel, values, { scale, credit, targetValues, by }) {
  if (scale === "response" && channel !== "advantage") {
    return group.responses.map((response) => scaleTop(values.subarray(response.start, response.end)));
  }
  const ofStep = scale === "step" && !targetValues && by === "token" ? group.stepTop(channel, credit) : null;
  const top = ofStep ?? scaleTop(values);
  return group.responses.map(() => top);
}

/** One number for the legend, or null when every response has its own. */
export function sharedTop({ channel, tops }, scale) {
  return scale === "response" && channel !== "advantage" && tops.length > 1 ? null : (tops[0] ?? NaN);
}

export function largestTop({ tops }) {
  return tops.reduce((most, top) => (Number.isFinite(top) ? Math.max(most, top) : most), 0);
}
