// The cell to the left of a response: reward, advantage, length, Σ influence, and what is special about it.

import { append, element } from "../dom.js";
import { fixed, MISSING, signed } from "../format.js";
import { SELECTION_REMARKS } from "./header.js";
import { sumOver } from "./model.js";
import { valueCurve } from "./value_curve.js";

export function metaHead(group) {
  const names = group.isChain ? ["Response", "Reward", "Advantage", "Tokens", ""] : ["Response"];
  const sums = group.isChain && group.credits.length ? "Σ influence: its tokens, its prompt positions" : null;
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
  if (!group.isChain) {
    for (const [name, value] of Object.entries(response.reward_parts))
      add(name, rewardText(value), "a part of the reward, before its weight in the sum");
  }
  if (!group.isChain && group.credits.length) {
    const hint =
      "Σ influence over the tokens of this response; below it the part that falls on positions of the prompt";
    row.sumCells = ["Σ influence", "Σ at prompt"].map((name) => add(name, "", hint));
  }
  row.meta.replaceChildren(numbers, row.remarks);
  row.node.setAttribute("aria-label", describe(response, group));
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

/** Σ influence under the credit shown. Position credit also lands on prompt positions: that part is named apart. */
export function showSums(row, credit, style) {
  const { group, response } = row;
  const values = group.values("influence", credit);
  const total = values ? style.signed(sumOver(values, response)) : MISSING;
  const prompt =
    credit === "position" && response.prompt_influence !== null ? style.signed(response.prompt_influence) : MISSING;
  if (row.sumCells) {
    row.sumCells[0].textContent = total;
    row.sumCells[1].textContent = prompt;
  }
  const remarks = [];
  if (group.isChain && group.credits.length) {
    remarks.push(`Σ ${total}`);
    if (prompt !== MISSING) remarks.push(`prompt ${prompt}`);
  }
  if (group.isChain) {
    for (const [name, value] of Object.entries(response.reward_parts)) remarks.push(`${name} ${rewardText(value)}`);
  }
  if (response.first_wrong >= 0 && response.first_wrong !== null) remarks.push(`wrong at ${response.first_wrong}`);
  if (!response.finished) remarks.push("cut at the length limit");
  const selection = SELECTION_REMARKS[response.selection];
  if (selection) remarks.push(selection);
  row.remarks.replaceChildren(...remarks.map((text) => element("span", "", text)));
}

/** While a token is selected: what it does to this response. */
export function showEffect(row, text, own) {
  row.remarks.replaceChildren(
    element("span", "", own ? "on its own response" : "influence on it"),
    element("b", "", text),
  );
}
