// Responses of several turns: who wrote which part, as in a chat, and a strip with a number for every turn.

import { SIGNED, levelName } from "../colours.js";
import { button, element } from "../dom.js";
import { numberStyle, withUnit } from "../format.js";
import { largestSize } from "../statistics.js";

const PREVIEW = 40;
const NAMES = { assistant: "policy", tool: "tool", user: "user", environment: "not the policy" };

/** @typedef {{start: number, end: number, turn: number, role: string, tool: string}} Segment positions in a response */

/** Who wrote a segment, in words. */
function authorOf({ role, tool }) {
  return role === "tool" && tool ? `tool ${tool}` : NAMES[role];
}

/** The spans of a slot's tokens as a chat: a block for each author, those of tools folded. */
export function chat(response, spans) {
  return response.segments.map((segment) => {
    const own = spans.slice(segment.start, segment.end);
    if (segment.role === "assistant")
      return element("div", "segment", element("span", "author", `policy, turn ${segment.turn + 1}`), ...own);
    const text = response.pieces.slice(segment.start, segment.end).map((piece) => piece.text);
    const whole = text.join("");
    const shown = whole.length > PREVIEW ? `${whole.slice(0, PREVIEW - 1)}…` : whole;
    const title = "The policy did not write this: no loss, no scores. Click to see its tokens.";
    const summary = element("summary", "", { title }, element("span", "author", authorOf(segment)), " ", shown);
    return element("details", `segment ${segment.role}`, summary, ...own);
  });
}

/** [{turn, start, influence, delta}]: sums over what the policy wrote in each turn; NaN where nothing is known. */
function turnSums(group, response, score) {
  const sumOf = (values, { start, end }) => {
    const known = values?.subarray(response.start + start, response.start + end).filter(Number.isFinite);
    return known?.length ? known.reduce((sum, value) => sum + value, 0) : NaN;
  };
  return (response.segments ?? [])
    .filter(({ role }) => role === "assistant")
    .map((segment) => ({
      turn: segment.turn,
      start: segment.start,
      influence: sumOf(group.values("influence", score), segment),
      delta: sumOf(group.values("delta_v"), segment),
    }));
}

/** A button for every turn of a response with its sums of influence and ΔV; a click goes to the turn. */
export function showTurns(row, score, onPick) {
  row.meta.querySelector(".turns")?.remove();
  const { group, response } = row;
  if (!response.segments) return;
  const everyone = group.responses.flatMap((each) => turnSums(group, each, score));
  const top = largestSize(everyone.map(({ influence }) => influence));
  const style = group.styleOf("influence", top);
  const strip = element("div", "turns", { role: "group", "aria-label": `Turns of ${response.name}` });
  for (const { turn, start, influence, delta } of turnSums(group, response, score)) {
    const parts = [`turn ${turn + 1}`];
    if (Number.isFinite(influence)) parts.push(`Σ ${withUnit(style.signed(influence), style)}`);
    if (Number.isFinite(delta)) parts.push(`ΔV ${numberStyle(1).signed(delta)}`);
    const title = "What the policy wrote in this turn: influence and ΔV, summed over its tokens.";
    const level = Math.sign(influence) * Math.ceil((3 * Math.abs(influence)) / top);
    strip.append(button(levelName(SIGNED, level), parts.join(" "), () => onPick(response.index, start), { title }));
  }
  row.meta.append(strip);
}
