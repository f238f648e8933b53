// What is under the pointer, in one line at the bottom of the window: a tooltip would cover the neighbours, which are
// the context that gives a token its meaning.

import { element, setAttributes } from "../dom.js";
import { visibleText } from "../token_text.js";
import { tokenBytes, tokenMetrics } from "./metrics.js";

export class Readout {
  constructor() {
    this.node = setAttributes(element("div", "readout"), { role: "tooltip" });
    this.node.hidden = true;
    this.token = null;
  }

  show(group, token, context) {
    const { response, targetEffect } = context;
    const position = token - response.start;
    const item = (name, text) => element("span", "", element("span", "name", name), text);
    this.node.replaceChildren(
      element("span", "token-chip", visibleText(group.entry(token), group.piece(token))),
      element("span", "", `${response.name}, position ${position}`),
      item("id", String(group.entry(token).id)),
      item("bytes", tokenBytes(group, token)),
      ...tokenMetrics(group, token, context).map(({ name, text }) => item(name, text)),
    );
    if (targetEffect) this.node.append(item(targetEffect.name, targetEffect.text));
    if (position === response.first_wrong) {
      const right = group.expectedAt(position);
      this.node.append(element("span", "note", `first wrong token${right ? `, expected ${visibleText(right)}` : ""}`));
    }
    this.node.hidden = false;
  }

  hide() {
    this.node.hidden = true;
  }
}
