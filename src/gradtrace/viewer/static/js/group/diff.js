// Two responses side by side: what they share at the beginning once, then each from the first difference on.

import { button, element, menuOf } from "../dom.js";
import { plural } from "../format.js";
import { visibleText } from "../token_text.js";

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
export function differing(a, b) {
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
