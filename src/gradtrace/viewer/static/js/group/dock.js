// The numbers of a token: in the line under the pointer and, once selected, in the dock at the bottom.

import { CHANNELS, SCORE_NAMES, furtherChannels } from "../channels.js";
import { acceptedMark, button, element, readoutItem } from "../dom.js";
import { fixed, numberStyle, scoreStyle, signed, withUnit } from "../format.js";
import { extent, largestSize } from "../statistics.js";
import { hexOf, tokenChip, visibleText } from "../text.js";

const BAR_AREA = 52;
const BAR_TOP = 34;

/**
 * A token and what the page knows about it: its response, its place there, the tops of the small bars, the score shown,
 * and further lines about its unit and about its effect on one response.
 * @typedef {{token: number, response: any, position: number, tops: Record<string, number>, score: string,
 *   more: {name: string, text: string}[]}} TokenContext
 */

export class Dock {
  constructor({ onClose, onJump }) {
    this.onJump = onJump;
    this.node = element("aside", "dock", { "aria-label": "The selected token", hidden: true });
    this.close = button("icon", "×", onClose, { "aria-label": "Close", title: "Close (esc)" });
  }

  get height() {
    return this.node.hidden ? 0 : this.node.offsetHeight;
  }

  /**
   * effects: {members, values, sum, why}; values is null where no effect was stored, and `why` says so.
   * below: a node that stands under the three parts.
   * @param {TokenContext} context
   */
  show(group, context, effects, order, below) {
    const title = element("h3", "", "Influence of this token on each response");
    const parts = effects.values
      ? [this.barsPart(effects, context, order), sumPart(effects)]
      : [element("div", "", title, element("p", "say", effects.why)), element("div")];
    this.node.replaceChildren(tokenPart(group, context), ...parts, below, this.close);
    this.node.hidden = false;
  }

  hide() {
    this.node.hidden = true;
  }

  barsPart({ members, values, unit, scoreName, shownName }, { response }, order) {
    const [low, high] = extent([0, ...values]);
    const range = high - low || 1;
    const largest = Math.max(high, -low);
    const style = scoreStyle(unit, largest, largest >= 1 ? 3 : 2);
    const zero = BAR_TOP + BAR_AREA * (high / range);
    const columnOf = new Map(members.map((member, column) => [member.response, column]));
    const sides = [true, false].map((accepted) => {
      const shown = order.filter((each) => each.accepted === accepted && columnOf.has(each.index));
      const columns = shown.map((each) => {
        const isOwn = each.index === response.index;
        return this.barColumn(each, values[columnOf.get(each.index)], isOwn, { zero, range, style });
      });
      const title = element("em", "", accepted ? "on the accepted" : "on the rejected");
      return element("div", "side", { style: { "--count": String(Math.max(1, shown.length)) } }, title, ...columns);
    });
    const outside = members.filter((member) => member.response === null).length;
    const note = outside
      ? element("p", "say", `${outside} responses of other prompts are part of the score and not drawn.`)
      : null;
    const of = style.unit ? `, ${style.unit}` : shownName ? ` (${scoreName} credit)` : "";
    const title = `Influence of this token on each response${of}`;
    return element("div", "", element("h3", "", title), element("div", "bars", ...sides), note);
  }

  barColumn(response, value, isOwn, { zero, range, style }) {
    const height = Number.isFinite(value) ? Math.max(1, (Math.abs(value) / range) * BAR_AREA) : 0;
    const at = (top, more = {}) => ({ style: { top: `${top}px`, ...more } });
    const bar = at(value < 0 ? zero + 1 : zero - height, { height: `${height}px` });
    const title = `${response.name}${isOwn ? ", its own response" : ""}: ${style.signed(value)}. Go there.`;
    const column = button(`bar-column${isOwn ? " own" : ""}`, "", () => this.onJump(response.index), { title });
    column.append(
      element("i", "axis", at(zero)),
      element("i", `value-bar ${value < 0 ? "n4" : "p4"}`, bar),
      element("span", "value", at(value < 0 ? zero + height + 1 : zero - height - 14), style.signed(value)),
      element("span", "name", acceptedMark(response.accepted), response.name),
    );
    return column;
  }
}

/** @param {TokenContext} context */
function tokenPart(group, context) {
  const { token, response, position } = context;
  const title = `${response.name}, position ${position}${position === response.first_wrong ? ", first wrong" : ""}`;
  const bytes = element("div", "dim", `id ${group.entry(token).id}, bytes ${tokenBytes(group, token)}`);
  const names = element("div", "", element("h3", "", title), bytes);
  const lines = tokenMetrics(group, context).flatMap(({ name, text, share, tone }) => {
    const style = { width: `max(2px, ${100 * Math.min(1, share)}%)`, background: `var(--${tone})` };
    const bar = element("span", "mini", tone && share > 0 ? { style } : null);
    return [element("dt", "", name), element("dd", "", bar), element("dd", "", text)];
  });
  const chip = tokenChip(group.entry(token), group.piece(token));
  return element("div", "", element("div", "who", chip, names), element("dl", "", ...lines));
}

function sumPart({ sum, score, unit, scoreName, shownName, sign, excludesSelf }) {
  const inNats = unit === "nats";
  const top = largestSize(sum.lines.map((line) => line.value));
  const style = scoreStyle(unit, Math.max(top, Math.abs(sum.total)));
  const lines = sum.lines.flatMap(({ label, value }) => [
    element("dt", "", label),
    element("dd", "", style.signed(value)),
  ]);
  const own = shownName ? `= its score by ${scoreName} credit` : "= influence of this token";
  const name = inNats ? "= its influence on its own prompt" : own;
  const total = [element("dt", "total", name), element("dd", "total", style.signed(sum.total))];
  const meaning = sum.total > 0 ? `Positive: ${sign}.` : `Negative: the reverse of “${sign}”.`;
  const other = inNats
    ? " Its influence above is by the whole mini-batch’s gradient, other prompts included."
    : shownName
      ? ` The effects were stored by ${scoreName} credit; the tokens show ${shownName}.`
      : "";
  const tolerance = (inNats ? 0.02 : 1e-3) * Math.max(top, Math.abs(score)) + 1e-12;
  const why = inNats ? "the rest is curvature" : "responses outside this trace took part in it";
  const stored = `The stored score is ${withUnit(style.signed(score), style)}: ${why}.`;
  return element(
    "div",
    "",
    element("h3", "", inNats ? `How it adds up, ${style.unit}` : `How the score adds up (${scoreName} credit)`),
    element("dl", "sum-table", ...lines, ...total),
    element("p", "say", meaning + (excludesSelf ? " Its own response is left out." : "") + other),
    Math.abs(score - sum.total) > tolerance ? element("p", "say", stored) : null,
  );
}

/** What stands in the line at the bottom of the window while the pointer is on a token. @param {TokenContext} context */
export function readoutParts(group, context) {
  const { token, response, position, more } = context;
  const right = group.expected[position];
  const wrong = `first wrong token${right ? `, expected ${visibleText(right)}` : ""}`;
  return [
    tokenChip(group.entry(token), group.piece(token)),
    element("span", "", `${response.name}, position ${position}`),
    readoutItem({ name: "id", text: String(group.entry(token).id) }),
    readoutItem({ name: "bytes", text: tokenBytes(group, token) }),
    ...[...tokenMetrics(group, context), ...more].map(readoutItem),
    ...(position === response.first_wrong ? [element("span", "note", wrong)] : []),
  ];
}

/**
 * [{name, text, share, tone}]: share 0…1 and tone (a colour variable) make a small bar.
 * @param {any} group @param {TokenContext} context
 */
function tokenMetrics(group, { token, response, position, tops, score: shown }) {
  const lines = [];
  const here = (channel) => group.values(channel)?.[token];
  /** A line where there is a value; `top`: it has a bar, and a sign if no `tone` is given. */
  const add = (name, value, text, top = null, tone = value < 0 ? "n4" : "p4") => {
    if (!Number.isFinite(value)) return;
    lines.push({ name, text: text(value), ...(top === null ? {} : { share: Math.abs(value) / top, tone }) });
  };
  add("entropy", here("entropy"), (value) => `${fixed(value, 3)} nats`, tops.entropy, "e4");
  add("log-prob", here("log_prob"), (value) => `${fixed(value, 3)} (p ${probability(Math.exp(value))})`);
  if (Math.abs(here("mismatch")) >= 5e-4)
    add("trainer/sampler", here("mismatch"), (value) => `ratio ${fixed(Math.exp(value), 3)}`);
  const score = (name, channel, values, top) => {
    const style = group.styleOf(channel, values?.[token]);
    add(name, values?.[token], (value) => withUnit(style.signed(value), style), top);
  };
  for (const each of group.scores.toSorted((a) => (a === shown ? -1 : 1))) {
    const values = group.values("influence", each);
    score(each === shown ? "influence" : `by ${SCORE_NAMES[each]}`, "influence", values, tops[each]);
    if (!Number.isFinite(values[token]) && each === shown) lines.push({ name: "influence", text: "not captured" });
  }
  score("on own prompt", "influence_own", group.values("influence_own"), tops.influence_own);
  const [before, after] = [here("log_prob_before"), here("log_prob_after")].map(Math.exp);
  add("by the step", after, () => `p ${probability(before)} → ${probability(after)}`);
  for (const [index, { entry, before: from, after: to }] of group.gainedBeside(response, position).entries()) {
    const [low, high] = [from, to].map(probability);
    if (low !== high) lines.push({ name: index ? "" : "gained most", text: `${visibleText(entry)}: ${low} → ${high}` });
  }
  const error = () => fixed(group.channels.get("delta_v_stderr")[token], 3);
  add("ΔV", here("delta_v"), (value) => `${signed(value, 3)} ± ${error()}`, tops.delta_v);
  const itself = (value) => numberStyle(Math.abs(value)).signed(value);
  add("to reference", here("reference_gap"), itself);
  add("gradient share", here("token_grad_share"), itself);
  for (const name of furtherChannels(group)) add(CHANNELS[name].title.toLowerCase(), here(name), itself);
  if (group.isPassedOver(token)) lines.push({ name: "clipped", text: "training takes no step on it" });
  if (response.advantage !== null) lines.push({ name: "advantage", text: signed(response.advantage, 2) });
  return lines;
}

function probability(value) {
  return value >= 0.01 || value === 0 ? fixed(value, value > 0.995 && value < 1 ? 4 : 2) : value.toExponential(0);
}

function tokenBytes(group, token) {
  const hex = hexOf(group.entry(token).bytes);
  return hex.length > 26 ? `${hex.slice(0, 23)} …` : hex;
}
