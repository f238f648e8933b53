// The responses: a cell with numbers and two heat maps each. Spans are made when a row comes near the screen, so that
// a group of 16 × 4,096 tokens opens as fast as a small one.

import { CHANNELS } from "../channels.js";
import { levelName } from "../colours.js";
import { acceptedMark, append, button, element, setAttributes } from "../dom.js";
import { MISSING, fixed, signed, withUnit } from "../format.js";
import { drawingClass, rawText, richText, tokenSpan } from "../text.js";
import { valueCurve } from "./counterfactual.js";
import { SELECTION_REMARKS } from "./head.js";
import { sumOver } from "./model.js";
import { chat } from "./turns.js";

export class ResponseRow {
  constructor(group, response, onTarget) {
    this.group = group;
    this.response = response;
    this.spans = [null, null];
    this.flags = new Map();
    this.meta = element("div", "meta");
    this.remarks = element("div", "remarks");
    this.slots = [0, 1].map((slot) => {
      const tokens = element("div", `tokens slot-${slot}`, { tabindex: 0, role: "group" });
      return Object.assign(tokens, { row: this, slotIndex: slot });
    });
    this.reading = element("div", "reading");
    const side = !group.mixed ? "plain" : response.accepted ? "accepted" : "rejected";
    this.node = element("section", `row ${side}`, this.meta, ...this.slots, this.reading);
    this.name = append(
      button("response-id", null, () => onTarget(response.index)),
      { title: `Show what every token of the group does to ${response.name}` },
      group.mixed ? acceptedMark(response.accepted) : null,
      response.name,
    );
  }

  get isBuilt() {
    return this.spans[0] !== null;
  }

  /** Make the spans of both slots, in the colours given. */
  build(colourings) {
    if (this.isBuilt) return;
    const { group, response } = this;
    const entries = group.entriesOf(response);
    this.bases = entries.map((entry, position) => {
      const token = response.start + position;
      const isWrong = position === response.first_wrong;
      const marks = { fw: isWrong, clipped: group.isPassedOver(token), ms: group.isOfOthers(token) };
      const set = Object.keys(marks).filter((mark) => marks[mark]);
      return [drawingClass(entry, response.pieces[position]), ...set].join(" ");
    });
    for (const [slot, container] of this.slots.entries()) {
      const spans = entries.map((entry, position) =>
        Object.assign(tokenSpan(entry, response.pieces[position]), { token: response.start + position }),
      );
      this.spans[slot] = spans;
      const fragment = document.createDocumentFragment();
      for (const part of response.segments ? chat(response, spans) : spans) fragment.append(part);
      container.replaceChildren(fragment);
      container.style.minHeight = "";
    }
    this.paint(colourings);
  }

  /** The text as people read it: characters whole, Markdown and LaTeX shown as what they mean. */
  read() {
    if (this.reading.childNodes.length) return;
    const entries = this.group.entriesOf(this.response).filter((entry) => !entry.special);
    this.reading.append(...richText(rawText(entries)));
  }

  /** Colour classes only: themes are CSS variables and cost nothing. */
  paint(colourings) {
    for (const [slot, { channel }] of colourings.entries()) {
      const { title } = CHANNELS[channel];
      const name = channel === "delta_v" ? title : title.toLowerCase();
      setAttributes(this.slots[slot], {
        "data-channel": name,
        "aria-label": `${this.response.name}, ${this.response.length} tokens coloured by ${name}; arrow keys walk through them`,
      });
    }
    if (!this.isBuilt) return;
    this.colourings = colourings;
    for (let position = 0; position < this.bases.length; position++) {
      for (const slot of [0, 1]) this.paintToken(slot, position);
    }
  }

  paintToken(slot, position) {
    const { channel, levels, values } = this.colourings[slot];
    const token = this.response.start + position;
    const level = levels[token];
    let name = this.bases[position];
    if (level) name += ` ${levelName(CHANNELS[channel], level)}`;
    else if ((channel === "influence" || channel === "delta_v") && values !== null && Number.isNaN(values[token]))
      name += " nc";
    for (const flag of this.flags.get(position) ?? []) name += ` ${flag}`;
    const span = this.spans[slot][position];
    if (span.className !== name) span.className = name;
  }

  /** hov, sel or found, on both spans of a token. Remembered for rows that are not built yet. */
  flag(position, flag, on) {
    const others = (this.flags.get(position) ?? []).filter((each) => each !== flag);
    this.flags.set(position, on ? [...others, flag] : others);
    for (const spans of this.isBuilt ? this.spans : []) {
      spans[position].classList.toggle(flag, on);
      if (on && flag !== "hov") unfold(spans[position]);
    }
  }

  /** Space for a row that is not built, so that jumps land where they should. */
  reserve(height) {
    this.node.style.containIntrinsicBlockSize = `auto ${height}px`;
    if (!this.isBuilt) for (const container of this.slots) container.style.minHeight = `${height}px`;
  }
}

/** Show a token that stands in a folded part. */
function unfold(span) {
  const fold = span.closest("details");
  if (fold) fold.open = true;
}

/** Lines that a response fills when `perLine` characters fit. */
export function estimatedLines(response, perLine) {
  let lines = 0;
  let used = 0;
  for (const { text } of response.pieces) {
    if (text.startsWith("\n")) {
      lines += Math.max(1, Math.ceil(used / perLine));
      used = 0;
    } else used += text.length;
  }
  return lines + Math.max(1, Math.ceil(used / perLine));
}

export function metaHead(group) {
  const names = group.isChain ? ["Response", "Reward", "Advantage", "Tokens", ""] : ["Response"];
  const atPrompt = hasPromptPart(group) ? ": its tokens, its prompt positions" : "";
  const sums = group.isChain && group.scores.length ? `Σ influence${atPrompt}` : null;
  const heads = names.map((name) => element("span", "", name));
  return element("div", "meta-head", ...heads, sums && element("span", "wide", sums));
}

export function fillMetaCell(row) {
  const { group, response } = row;
  const numbers = element("div", "numbers", row.name);
  const add = (name, text, title = null) => {
    const value = element("span", "", text);
    append(numbers, group.isChain ? null : element("span", "key", { title }, name), value);
    return value;
  };
  add("reward", rewardText(response.reward));
  add("advantage", response.advantage === null ? MISSING : signed(response.advantage, 2));
  add("tokens", String(response.length));
  for (const [name, value] of Object.entries(group.isChain ? {} : response.reward_parts))
    add(name, rewardText(value), "a part of the reward, before its weight in the sum");
  const hints = {
    "Σ influence": "influence, summed over the tokens of this response",
    "Σ at prompt": "the part that falls on positions of the prompt",
  };
  const names = group.isChain || !group.scores.length ? [] : Object.keys(hints).slice(0, hasPromptPart(group) ? 2 : 1);
  row.sumCells = names.map((name) => add(name, "", hints[name]));
  row.meta.replaceChildren(numbers, row.remarks);
  row.node.setAttribute("aria-label", describe(response, group));
}

/** Position credit also lands on positions of the prompt. */
function hasPromptPart({ scores }) {
  return scores.includes("influence_position");
}

const rewardText = (value) => (value === null ? MISSING : fixed(value, Number.isInteger(value) ? 1 : 2));

/** V along the response, below its numbers, where it was measured. */
export function showCurve(row, onPick) {
  const { group, response } = row;
  row.meta.querySelector(".value-curve")?.remove();
  append(
    row.meta,
    valueCurve(group, response, (position) => onPick(response.start + position)),
  );
}

function describe(response, group) {
  const side = !group.mixed ? "" : response.accepted ? ", accepted" : ", rejected";
  return `Response ${response.name}${side}, reward ${fixed(response.reward, 2)}, ${response.length} tokens`;
}

/** Σ of the score shown. Position credit also lands on prompt positions: that part is named apart. */
export function showSums(row, score, style) {
  const { group, response } = row;
  const values = group.values("influence", score);
  const sum = values ? style.signed(sumOver(values, response)) : MISSING;
  const total = withUnit(sum, style);
  const prompt =
    score === "influence_position" && response.prompt_influence !== null
      ? style.signed(response.prompt_influence)
      : MISSING;
  for (const [index, cell] of row.sumCells.entries()) cell.textContent = [sum, prompt][index];
  const [first] = row.sumCells;
  if (first && style.unit) first.previousElementSibling.textContent = `Σ ${style.unit}`; // narrow: both do not fit beside
  const { reward_parts: parts, first_wrong: wrong } = response;
  const remarks = [
    group.isChain && group.scores.length ? `Σ ${total}` : "",
    group.isChain && group.scores.length && prompt !== MISSING ? `prompt ${prompt}` : "",
    ...(group.isChain ? Object.entries(parts).map(([name, value]) => `${name} ${rewardText(value)}`) : []),
    wrong !== null && wrong >= 0 ? `wrong at ${wrong}` : "",
    response.finished ? "" : "cut at the length limit",
    SELECTION_REMARKS[response.selection] ?? "",
  ];
  row.remarks.replaceChildren(...remarks.filter(Boolean).map((text) => element("span", "", text)));
}

/** While a token is selected: what it does to this response. */
export function showEffect(row, text, own) {
  row.remarks.replaceChildren(
    element("span", "", own ? "on its own response" : "influence on it"),
    element("b", "", text),
  );
}
