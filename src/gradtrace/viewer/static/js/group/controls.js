// The controls above a group: how it is laid out, scaled and ordered, the search box, and two responses compared.

import { scoreHint, scoreNames } from "../channels.js";
import { searchBox } from "../controls.js";
import { button, element, menuOf } from "../dom.js";
import { plural } from "../format.js";
import { placeOf, startsOf } from "../statistics.js";
import { visibleText } from "../text.js";
import { ORDERS, fitsSideBySide } from "./sheet.js";
import { UNITS } from "./units.js";

const NARROW = 1100;
/** Below this width text comes first and controls are folded. */
export const SMALL = 720;

/**
 * What a reader chooses about a group, by its name in the address. `key` goes on to the next value; `otherwise`: what
 * holds where the address says nothing; `unwritten`: the address does not say that it does.
 * @typedef {{label: string, options: Record<string, string>, otherwise: string, key: string, unwritten?: boolean,
 *   hint?: string, disabled?: Record<string, string>, hidden?: boolean}} Choice
 */

/** @returns {Record<string, Choice>} */
export function choicesOf(group) {
  const { scores, hasTurns } = group;
  return {
    view: {
      label: "View",
      options: { side: "side by side", stack: "stacked", one: "one", read: "reading" },
      otherwise: defaultView(group),
      key: "v",
    },
    scale: {
      label: "Colour scale, 99th pct. of",
      options: named(["response", "group", "step"]),
      otherwise: "group",
      key: "s",
    },
    by: {
      label: "By",
      options: named(UNITS.filter((unit) => unit !== "turn" || hasTurns)),
      otherwise: "token",
      unwritten: true,
      key: "b",
      hint: "Influence and ΔV of a sentence, a line or a turn are the sums over its tokens; entropy and log-prob are the means.",
    },
    score: {
      label: "Score",
      options: scoreNames(scores),
      otherwise: scores[0] ?? "",
      unwritten: true,
      key: "c",
      hint: scoreHint(scores),
      hidden: scores.length < 2,
    },
    order: {
      label: "Order",
      options: named(ORDERS),
      otherwise: ORDERS[0],
      key: "o",
      disabled: scores.length ? {} : { influence: "" },
    },
  };
}

function named(values) {
  return Object.fromEntries(values.map((value) => [value, value]));
}

/** The values of a choice that can be chosen. @param {Choice} choice */
export function valuesOf({ options, disabled = {} }) {
  return Object.keys(options).filter((value) => !(value in disabled));
}

/** Side by side, unless columns would be too narrow; without influence there is nothing to put beside entropy. */
export function defaultView(group) {
  if (!group.scores.length || innerWidth <= SMALL) return "one";
  return innerWidth < NARROW || !fitsSideBySide(group, innerWidth) ? "stack" : "side";
}

export class FindBar {
  /** on: {change(needle), jump(response, position)} */
  constructor(sheet, needle, on) {
    this.sheet = sheet;
    this.on = on;
    this.hits = [];
    this.at = -1;
    const words = "Find in responses";
    const step = (isBackwards) => this.step(isBackwards ? -1 : 1);
    this.count = element("span", "", { "aria-live": "polite" });
    this.node = element(
      "div",
      "find",
      searchBox(words, words, needle, (value) => this.find(value), step),
      this.count,
    );
  }

  find(needle) {
    this.on.change(needle);
    this.flagHits(false);
    this.hits = needle
      ? this.sheet.responses.flatMap((response) => findInResponse(response, needle.toLowerCase()))
      : [];
    this.at = -1;
    this.flagHits(true);
    this.count.textContent = needle ? plural(this.hits.length, "hit") : "";
  }

  flagHits(on) {
    for (const { response, from, to } of this.hits)
      for (let position = from; position < to; position++) this.sheet.rows[response.index].flag(position, "found", on);
  }

  step(direction) {
    if (!this.hits.length) return;
    this.at = (this.at + direction + this.hits.length) % this.hits.length;
    const hit = this.hits[this.at];
    this.count.textContent = `${this.at + 1} of ${this.hits.length}`;
    this.on.jump(hit.response.index, hit.from);
  }
}

/** [{response, from, to}]: positions, whatever the case of the text. */
function findInResponse(response, wanted) {
  const { text, starts } = searchable(response);
  const hits = [];
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
    hits.push({ response, from: placeOf(starts, at), to: placeOf(starts, at + wanted.length - 1) + 1 });
  }
  return hits;
}

/** The response in lower case, and where each token begins in it. Made once per response. */
function searchable(response) {
  if (!response.searchable) {
    const parts = response.pieces.map(({ text }) => text.toLowerCase());
    response.searchable = { text: parts.join(""), starts: startsOf(parts.map((part) => part.length)) };
  }
  return response.searchable;
}

/** Above this many comparisons the middle of two long responses is shown as different throughout. */
const MOST_WORK = 4e6;
/** Tokens of the shared beginning that are shown; the rest is folded. */
const LAST_SHARED = 40;

/** How many tokens two lists share at their beginning. */
function sharedLength(a, b) {
  let length = 0;
  while (length < Math.min(a.length, b.length) && a[length] === b[length]) length += 1;
  return length;
}

/** For both lists, which of their elements are not part of a longest common subsequence. */
function differing(a, b) {
  const marks = [new Uint8Array(a.length).fill(1), new Uint8Array(b.length).fill(1)];
  const width = b.length + 1;
  if (a.length * b.length > MOST_WORK) return marks;
  const longest = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      longest[i * width + j] =
        a[i] === b[j]
          ? longest[(i + 1) * width + j + 1] + 1
          : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) {
      marks[0][i++] = 0;
      marks[1][j++] = 0;
    } else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return marks;
}

export class DiffPanel {
  /** pair: [a, b] as the address has it, or null. onChange(pair) is told what was chosen. */
  constructor(group, pair, onChange) {
    this.group = group;
    this.onChange = onChange;
    const names = [["", "–"], ...group.responses.map(({ index, name }) => [index, name])];
    this.menus = ["Compare", "with"].map((label) => menuOf(`${label} response`, names, () => this.choose()));
    this.chooser = element("div", "control diff-chooser", "Compare", this.menus[0], "with", this.menus[1]);
    this.node = element("section", "diff", { "aria-label": "Two responses compared" });
    this.show(pair);
  }

  /** One response alone is compared with the first accepted one that differs from it, or the first other one. */
  choose() {
    let [a, b] = this.menus.map((menu) => (menu.value === "" ? null : Number(menu.value)));
    if (a !== null && b === null) {
      const others = this.group.responses.filter(({ twins }) => !twins.includes(a));
      b = (others.find((each) => each.accepted) ?? others[0])?.index ?? null;
    }
    const pair = a === null || b === null ? null : [a, b];
    this.show(pair);
    this.onChange(pair);
  }

  show(pair) {
    const responses = pair?.map((index) => this.group.responses[index]);
    this.node.hidden = !responses?.every(Boolean);
    if (this.node.hidden) return;
    for (const [side, menu] of this.menus.entries()) menu.value = String(pair[side]);
    const tokens = responses.map(({ start, end }) => Array.from(this.group.channels.get("token").subarray(start, end)));
    const shared = sharedLength(tokens[0], tokens[1]);
    const isSame = shared === Math.max(tokens[0].length, tokens[1].length);
    const words = isSame
      ? "The two responses are the same."
      : `The same up to token ${shared}${shared ? "" : ": they differ from the start"}.`;
    const marks = differing(tokens[0].slice(shared), tokens[1].slice(shared));
    this.node.replaceChildren(
      element("p", "dim", words),
      ...(shared ? [this.line("both", this.sharedPart(responses[0], shared))] : []),
      ...(isSame ? [] : responses.map((each, side) => this.line(each.name, this.rest(each, shared, marks[side])))),
    );
  }

  line(name, content) {
    return element("div", "diff-line", element("b", "", name), content);
  }

  text(response, from, to) {
    return this.group.rawText(response.start + from, response.start + to);
  }

  sharedPart(response, shared) {
    const from = Math.max(0, shared - LAST_SHARED);
    const node = element("div", "diff-text", this.text(response, from, shared));
    if (from === 0) return node;
    const unfold = button("link-button", `${plural(from, "token")} before`, () =>
      unfold.replaceWith(this.text(response, 0, from)),
    );
    node.prepend(unfold, " … ");
    return node;
  }

  /** Runs of tokens that only this response has are marked, by a line and not by colour alone. */
  rest(response, from, marks) {
    const node = element("div", "diff-text");
    for (let i = 0; i < marks.length; ) {
      let end = i + 1;
      while (end < marks.length && marks[end] === marks[i]) end += 1;
      const text = this.text(response, from + i, from + end);
      const only = text.trim() ? text : visibleText({ text });
      node.append(marks[i] ? element("mark", "", only) : text);
      i = end;
    }
    return node;
  }
}
