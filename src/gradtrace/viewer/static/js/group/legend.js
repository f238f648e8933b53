// Column heads: what is shown, in which unit, what the colours and the sign mean.

import { CHANNELS, CREDIT_NAMES, MEANINGS, rampOf, WHY_MISSING } from "../channels.js";
import { LIKELIER } from "../meaning.js";
import { append, button, element, menuOf } from "../dom.js";
import { numberStyle } from "../format.js";

/** The colours of a channel from low to high, with what stands at both ends and in the middle. */
export function rampParts(channel, low, middle, high) {
  const ends = [element("b", "low", low), element("b", "middle", middle), element("b", "high", high)];
  return [...rampOf(channel).map((name) => element("i", name)), ...ends];
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

  /** top: of the scale, or null when every response has its own. */
  show({ channel, credit, top, target, onClearTarget, perResponse, unit, targetCredit }) {
    this.menu.value = channel;
    this.target.replaceChildren();
    if (channel === "influence" && target !== null) {
      this.target.append(`on ${target}`, button("", "all", onClearTarget));
    }
    this.unit.textContent =
      channel === "influence" ? unitLine(target === null ? credit : targetCredit, unit) : CHANNELS[channel].unit;
    this.unit.title = this.unit.textContent;
    const [low, middle, high] = ends(channel, top, perResponse);
    this.ramp.replaceChildren(...rampParts(channel, low, middle, high));
    this.ramp.setAttribute("aria-label", `colour scale from ${low} to ${high}`);
  }
}

function unitLine(credit, unit) {
  return `${credit === LIKELIER ? "if the token were likelier" : `${CREDIT_NAMES[credit]} credit`}, ${unit}`;
}

function ends(channel, top, perResponse) {
  if (perResponse)
    return CHANNELS[channel].signed ? ["−p99", "0", "+p99 of each response"] : ["0", "", "p99 of each response"];
  if (!(top > 0)) return ["", "no values", ""];
  const style = numberStyle(top, 2);
  if (CHANNELS[channel].signed) return [style.signed(-top), "0", style.signed(top)];
  if (channel === "no_step") return ["step", "", "no step"];
  if (channel === "log_prob") return ["0", "", `${style.plain(-top)} nats`];
  return ["0", "", `${style.plain(top)} nats`];
}

/** What positive and negative say, in channels that have a sign of their own. */
const SIGN_WORDS = {
  delta_v: [
    "the token made a high reward likelier.",
    "less likely. V after the token minus V before it, by sampled continuations.",
  ],
  mismatch: [
    "the trainer finds the token likelier than the sampler that drew it.",
    "less likely. Zero where both compute the same policy.",
  ],
  advantage: [
    "training raises the probability of this response.",
    "it lowers it. The parts of a reward are not stored for each response: the run page charts their means (reward_part/…).",
  ],
};

/** What the colours mean, in words; below the sticky head, so that it scrolls away once read. */
export function explanation(slot, channel, target, { sign, sentence, hasClipped, isThere }) {
  const node = element("p", `slot-${slot}`);
  if (!isThere) return append(node, WHY_MISSING[channel]);
  const ofInfluence =
    target === null
      ? [`${sign}.`, `the reverse. ${sentence}`]
      : [`a step along this token’s gradient raises ${target}’s own objective.`, "it lowers it."];
  const words = channel === "influence" ? ofInfluence : SIGN_WORDS[channel];
  if (MEANINGS[channel]) node.append(MEANINGS[channel]);
  if (words) {
    const sample = (name) => element("span", `sample ${name}`);
    node.append(sample("p4"), `Positive, bar above: ${words[0]} `, sample("n4"), `Negative, bar below: ${words[1]}`);
  }
  if (channel === "influence" && target === null && hasClipped)
    node.append(" ", element("span", "clipped", "clipped"), ": training takes no step on this token.");
  return node;
}
