// Column heads: what is shown, in which unit, what the colours and the sign mean.

import { CHANNELS, SCORE_NAMES } from "../channels.js";
import { rampOf } from "../colours.js";
import { append, button, element, menuOf } from "../dom.js";
import { withUnit } from "../format.js";

/**
 * What is shown beside the channels: the group, its score, the score's unit and what it says in words; or, where every
 * token's effect on one response is shown instead, that response and the score that these effects add up to.
 * @typedef {{group: import("./model.js").Group, score: string, unit: string, sign: string, sentence: string,
 *   target: string | null, targetScore: string, onClearTarget: () => void}} Shown
 */

/**
 * The colours of a legend from low to high, with what stands at both ends and in the middle.
 * @param {import("../colours.js").Look} look
 */
export function rampParts(look, low, middle, high) {
  const ends = [element("b", "low", low), element("b", "middle", middle), element("b", "high", high)];
  return [...rampOf(look).map((name) => element("i", name)), ...ends];
}

/** Head of one slot: a menu of the channels, the unit, the colour ramp with its ends. */
export class LegendHead {
  constructor(slot, onChannel) {
    const titles = Object.entries(CHANNELS).map(([value, { title }]) => [value, title]);
    this.menu = menuOf(`What column ${slot + 1} shows`, titles, () => onChannel(this.menu.value));
    this.target = element("span", "target");
    this.unit = element("span", "unit");
    this.ramp = element("div", "ramp", { role: "img" });
    const title = element("div", "", element("h2", "", this.menu, this.target), this.unit);
    this.node = element("div", `legend slot-${slot}`, title, this.ramp);
  }

  /** @param {import("./units.js").Colouring} colouring @param {Shown} shown */
  show({ channel, shared }, { group, score, unit, target, targetScore, onClearTarget }) {
    const isInfluence = channel === "influence";
    const onTarget = isInfluence && target !== null;
    this.menu.value = channel;
    this.target.replaceChildren(...(onTarget ? [`on ${target}`, button("", "all", onClearTarget)] : []));
    const inNats = group.meta.unit === "nats";
    const of = inNats ? "" : `${SCORE_NAMES[onTarget ? targetScore : score]} credit, `;
    const change = onTarget && inNats ? "change of its own part of the objective" : unit;
    this.unit.textContent = this.unit.title = isInfluence ? of + change : CHANNELS[channel].unit;
    const [low, middle, high] = ends(group, channel, shared);
    this.ramp.replaceChildren(...rampParts(CHANNELS[channel], low, middle, high));
    this.ramp.setAttribute("aria-label", `colour scale from ${low} to ${high}`);
  }
}

/** top: of the scale, or null where every response has its own. */
function ends(group, channel, top) {
  const { signed, unit } = CHANNELS[channel];
  if (top === null) return signed ? ["−p99", "0", "+p99 of each response"] : ["0", "", "p99 of each response"];
  if (!(top > 0)) return ["", "no values", ""];
  const style = group.styleOf(channel, top, 2);
  if (signed) return [style.signed(-top), "0", withUnit(style.signed(top), style)];
  if (channel === "no_step") return ["step", "", "no step"];
  if (channel === "log_prob") return ["0", "", `${style.plain(-top)} nats`];
  return ["0", "", `${style.plain(top)} ${unit}`];
}

/**
 * What the colours mean, in words; below the sticky head, so that it scrolls away once read.
 * @param {number} slot @param {import("./units.js").Colouring} colouring @param {Shown} shown
 */
export function explanation(slot, { channel, values }, { group, target, sign, sentence }, hasClipped) {
  const { meaning, signs, missing } = CHANNELS[channel];
  const node = element("p", `slot-${slot}`);
  if (values === null) return append(node, missing);
  const isInfluence = channel === "influence";
  const step =
    group.meta.unit === "nats" ? "training on this token raised" : "a step along this token’s gradient raises";
  const onTarget = [`${step} ${target}’s own objective.`, "it lowers it."];
  const words = !isInfluence ? signs : target === null ? [`${sign}.`, `the reverse. ${sentence}`] : onTarget;
  append(node, meaning || null);
  if (words) {
    const sample = (name) => element("span", `sample ${name}`);
    node.append(sample("p4"), `Positive, bar above: ${words[0]} `, sample("n4"), `Negative, bar below: ${words[1]}`);
  }
  if (isInfluence && target === null && hasClipped)
    node.append(" ", element("span", "clipped", "clipped"), ": training takes no step on this token.");
  return node;
}
