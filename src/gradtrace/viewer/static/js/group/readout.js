// What is under the pointer, in one line at the bottom of the window: a tooltip would cover the neighbours, which are
// the context that gives a token its meaning.

import { element, readoutItem } from "../dom.js";
import { visibleText } from "../token_text.js";
import { tokenBytes, tokenMetrics } from "./metrics.js";

export class Readout {
  constructor() {
    this.node = element("div", "readout", { role: "tooltip", hidden: true });
  }

  show(group, token, context) {
    const { response, units, targetEffects } = context;
    const position = token - response.start;
    this.node.replaceChildren(
      element("span", "token-chip", visibleText(group.entry(token), group.piece(token))),
      element("span", "", `${response.name}, position ${position}`),
      readoutItem({ name: "id", text: String(group.entry(token).id) }),
      readoutItem({ name: "bytes", text: tokenBytes(group, token) }),
      ...[...tokenMetrics(group, token, context), ...units, ...targetEffects].map(readoutItem),
    );
    if (position === response.first_wrong) {
      const right = group.expected[position];
      this.node.append(element("span", "note", `first wrong token${right ? `, expected ${visibleText(right)}` : ""}`));
    }
    this.node.hidden = false;
  }

  hide() {
    this.node.hidden = true;
  }
}
