// The dock at the bottom: the selected token, its effect on every response, and how its score adds up from them.

import { acceptedMark, append, button, element } from "../dom.js";
import { numberStyle } from "../format.js";
import { visibleText } from "../token_text.js";
import { tokenBytes, tokenMetrics } from "./metrics.js";

const BAR_AREA = 52;
const BAR_TOP = 34;

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
   */
  show(group, token, context, effects, order, below) {
    const parts = [tokenPart(group, token, context)];
    if (effects.values) parts.push(this.barsPart(effects, context, order), sumPart(effects));
    else {
      const title = element("h3", "", "Influence of this token on each response");
      parts.push(element("div", "", title, element("p", "say", effects.why)), element("div"));
    }
    this.node.replaceChildren(...parts, below, this.close);
    this.node.hidden = false;
  }

  hide() {
    this.node.hidden = true;
  }

  barsPart({ members, values, creditName, shownName }, { response }, order) {
    const high = Math.max(0, ...finite(values));
    const low = Math.min(0, ...finite(values));
    const range = high - low || 1;
    const largest = Math.max(high, -low);
    const style = numberStyle(largest, largest >= 1 ? 3 : 2);
    const zero = BAR_TOP + BAR_AREA * (high / range);
    const bars = element("div", "bars");
    for (const accepted of [true, false]) {
      const shown = order
        .filter((each) => each.accepted === accepted)
        .map((each) => ({ each, column: members.findIndex((member) => member.response === each.index) }))
        .filter(({ column }) => column >= 0);
      const columns = shown.map(({ each, column }) =>
        this.barColumn(each, values[column], { zero, range, style, own: each.index === response.index }),
      );
      const title = element("em", "", accepted ? "on the accepted" : "on the rejected");
      const wide = { "--count": String(Math.max(1, shown.length)) };
      bars.append(element("div", "side", { style: wide }, title, ...columns));
    }
    const outside = members.filter((member) => member.response === null).length;
    const note = outside
      ? element("p", "say", `${outside} responses of other prompts are part of the score and not drawn.`)
      : null;
    const title = `Influence of this token on each response${shownName ? ` (${creditName} credit)` : ""}`;
    return element("div", "", element("h3", "", title), bars, note);
  }

  barColumn(response, value, { zero, range, style, own }) {
    const height = Number.isFinite(value) ? Math.max(1, (Math.abs(value) / range) * BAR_AREA) : 0;
    const at = (top, more = {}) => ({ style: { top: `${top}px`, ...more } });
    const bar = at(value < 0 ? zero + 1 : zero - height, { height: `${height}px` });
    const title = `${response.name}${own ? ", its own response" : ""}: ${style.signed(value)}. Go there.`;
    return append(
      button(`bar-column${own ? " own" : ""}`, "", () => this.onJump(response.index), { title }),
      element("i", "axis", at(zero)),
      element("i", `value-bar ${value < 0 ? "n4" : "p4"}`, bar),
      element("span", "value", at(value < 0 ? zero + height + 1 : zero - height - 14), style.signed(value)),
      element("span", "name", acceptedMark(response.accepted), response.name),
    );
  }
}

function finite(values) {
  return Array.from(values).filter(Number.isFinite);
}

function tokenPart(group, token, context) {
  const { response } = context;
  const position = token - response.start;
  const title = `${response.name}, position ${position}${position === response.first_wrong ? ", first wrong" : ""}`;
  const names = element(
    "div",
    "",
    element("h3", "", title),
    element("div", "dim", `id ${group.entry(token).id}, bytes ${tokenBytes(group, token)}`),
  );
  const chip = element("span", "token-chip", visibleText(group.entry(token), group.piece(token)));
  const list = element("dl");
  for (const { name, text, share, tone } of tokenMetrics(group, token, context)) {
    const style = { width: `max(2px, ${100 * Math.min(1, share)}%)`, background: `var(--${tone})` };
    const bar = element("span", "mini", tone && share > 0 ? { style } : null);
    list.append(element("dt", "", name), element("dd", "", bar), element("dd", "", text));
  }
  return element("div", "", element("div", "who", chip, names), list);
}

function sumPart({ sum, score, creditName, shownName, sign, excludesSelf }) {
  const style = numberStyle(Math.max(...sum.lines.map((line) => Math.abs(line.value)), Math.abs(sum.total)));
  const table = element("dl", "sum-table");
  for (const { label, value } of sum.lines)
    table.append(element("dt", "", label), element("dd", "", style.signed(value)));
  table.append(element("dt", "total", "= influence of this token"), element("dd", "total", style.signed(sum.total)));
  const part = element("div", "", element("h3", "", `How the score adds up (${creditName} credit)`), table);
  const meaning = sum.total > 0 ? `Positive: ${sign}.` : `Negative: the reverse of “${sign}”.`;
  const other = shownName ? ` The effects were stored by ${creditName} credit; the tokens show ${shownName}.` : "";
  part.append(element("p", "say", meaning + (excludesSelf ? " Its own response is left out." : "") + other));
  const tolerance = 1e-3 * Math.max(...sum.lines.map((line) => Math.abs(line.value)), Math.abs(score)) + 1e-12;
  if (Number.isFinite(score) && Math.abs(score - sum.total) > tolerance) {
    const stored = `The stored score is ${style.signed(score)}: responses outside this trace took part in it.`;
    part.append(element("p", "say", stored));
  }
  return part;
}
