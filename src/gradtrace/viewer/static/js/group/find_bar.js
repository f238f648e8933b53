// The search box of the group page, its hits and its place among them. The browser's own search cannot see rows that
// are not drawn yet.

import { searchBox } from "../controls.js";
import { element } from "../dom.js";
import { plural } from "../format.js";
import { placeOf, startsOf } from "../scales.js";

export class FindBar {
  /** on: {change(needle), jump(response, position)} */
  constructor(sheet, needle, on) {
    this.sheet = sheet;
    this.on = on;
    this.hits = [];
    this.at = -1;
    this.box = searchBox("Find in responses", "Find in responses", needle, (value) => this.find(value));
    this.count = element("span", "", { "aria-live": "polite" });
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
    });
    this.node = element("div", "find", this.box, this.count);
  }

  find(needle) {
    this.on.change(needle);
    this.flagHits(false);
    this.hits = findInGroup(this.sheet.responses, needle);
    this.at = -1;
    this.flagHits(true);
    this.count.textContent = needle ? plural(this.hits.length, "hit") : "";
  }

  flagHits(on) {
    for (const { response, from, to } of this.hits) {
      for (let position = from; position < to; position++) this.sheet.rows[response.index].flag(position, "found", on);
    }
  }

  step(direction) {
    if (!this.hits.length) return;
    this.at = (this.at + direction + this.hits.length) % this.hits.length;
    const hit = this.hits[this.at];
    this.count.textContent = `${this.at + 1} of ${this.hits.length}`;
    this.on.jump(hit.response.index, hit.from);
  }
}

/** [{response, from, to}] positions, case-insensitive, in the order given. */
function findInGroup(order, needle) {
  const wanted = needle.toLowerCase();
  if (!wanted) return [];
  return order.flatMap((response) => findInResponse(response, wanted));
}

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
