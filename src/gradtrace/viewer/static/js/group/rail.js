// A cell per response at the right edge of long groups. Siblings that are off the screen keep a place there: which one
// is being read, and what the selected token does to each.

import { button, element, setAttributes } from "../dom.js";

export class Rail {
  constructor(group, onJump) {
    this.node = element("nav", "rail", { "aria-label": "Responses of this group" });
    this.cells = group.responses.map((response) => {
      const cell = button("", response.name, () => onJump(response.index));
      return Object.assign(cell, { response });
    });
  }

  makeRoom(height) {
    this.node.style.setProperty("--dock", `${height}px`);
  }

  place(order) {
    this.node.replaceChildren(...order.map((response) => this.cells[response.index]));
  }

  /** tint: class name per response or null; say: words per response. */
  show(current, tint = null, say = null) {
    for (const cell of this.cells) {
      const { index, accepted, name } = cell.response;
      cell.className = [accepted ? "accepted" : "rejected", index === current ? "current" : "", tint?.[index] ?? ""]
        .join(" ")
        .trim();
      const words = `${name}, ${accepted ? "accepted" : "rejected"}${say ? `, ${say[index]}` : ""}`;
      setAttributes(cell, { title: words, "aria-label": words, "aria-current": index === current ? "true" : null });
    }
  }
}
