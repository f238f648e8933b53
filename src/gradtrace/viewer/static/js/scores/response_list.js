// A table of responses, of which one can be open with its whole text.

import { acceptedMark, element } from "../dom.js";
import { count, fixed, sharedStart } from "../format.js";
import { neighbourIn } from "../page.js";
import { opener, wideRow } from "../sorting.js";

const MOST_ROWS = 60;

export class ResponseList {
  /**
   * cells(row): the cells after prompt, text and reward. opened(row, whole): what an open response shows.
   * @param {{url: any, groups: {text: string}[], texts: import("./response_text.js").ResponseTexts, width: number,
   *   cells: (row: any) => Node[], opened: (row: any, whole: any) => Node[]}} settings
   */
  constructor({ url, groups, texts, width, cells, opened }) {
    this.url = url;
    this.groups = groups;
    this.texts = texts;
    this.width = width;
    this.cells = cells;
    this.opened = opened;
    this.selected = url.number("sel");
    /** The response that j and k have reached. */
    this.cursor = null;
    this.rows = [];
    this.visible = [];
    this.node = element("tbody");
    const cut = sharedStart(groups.map((group) => group.text));
    for (const group of groups) group.text = group.text.slice(cut);
  }

  draw(rows = this.rows) {
    this.rows = rows;
    this.visible = rows.slice(0, MOST_ROWS);
    const picked = rows.find((row) => row.response === this.selected);
    if (picked && !this.visible.includes(picked)) this.visible.push(picked);
    this.node.replaceChildren();
    for (const row of this.visible) {
      this.node.append(this.row(row));
      if (row === picked) this.node.append(this.openRow(row));
    }
    const hidden = rows.length - this.visible.length;
    if (hidden > 0) this.node.append(wideRow("between", this.width, `${count(hidden)} more`));
    if (!rows.length) this.node.append(wideRow("dim", this.width, "No such response."));
  }

  row(row) {
    const isOpen = row.response === this.selected;
    const mark = row.accepted === null ? null : acceptedMark(row.accepted);
    return element(
      "tr",
      `opens${isOpen ? " current" : ""}`,
      { "data-response": row.response, onclick: () => this.select(isOpen ? null : row.response) },
      element("td", "c-prompt mono", this.groups[row.group].text),
      element("td", "c-text mono", mark, " ", opener(row.text, isOpen)),
      element("td", "number", fixed(row.reward, 2)),
      ...this.cells(row),
    );
  }

  openRow(row) {
    const node = wideRow("opened", this.width, element("p", "dim", "Loading …"));
    const cell = node.children[0];
    this.texts
      .get(row.response)
      .then((whole) => cell.replaceChildren(...this.opened(row, whole)))
      .catch((error) => cell.replaceChildren(element("p", "dim", `${error.message} Its beginning: ${row.text}`)));
    return node;
  }

  select(response) {
    this.selected = response;
    this.url.update({ sel: response });
    this.draw();
    this.node.querySelector("tr.current")?.scrollIntoView({ block: "nearest" });
  }

  move(direction) {
    const current = this.visible.find((row) => row.response === this.cursor);
    const next = neighbourIn(this.visible, current, direction);
    if (!next) return;
    this.cursor = next.response;
    for (const row of this.node.querySelectorAll("tr.opens"))
      row.classList.toggle("current", Number(row.getAttribute("data-response")) === this.cursor);
    this.node.querySelector("tr.current")?.scrollIntoView({ block: "nearest" });
  }

  /** Keys that every such list has. */
  get actions() {
    return {
      j: () => this.move(1),
      k: () => this.move(-1),
      Enter: () => this.cursor !== null && this.select(this.cursor === this.selected ? null : this.cursor),
    };
  }
}
