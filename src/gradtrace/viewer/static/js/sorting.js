// Tables whose heads sort them: the choice is in the address, missing values come last.

import { button, element, setAttributes } from "./dom.js";

export class Sorting {
  /**
   * @param {import("./url_state.js").UrlState} url
   * @param {{key: string, title: string, up?: boolean, number?: boolean, fixed?: boolean, hint?: string}[]} columns
   *   `up`: ascending at first; `fixed`: nothing to sort by
   * @param {string} otherwise the column at first
   * @param {() => void} onChange
   */
  constructor(url, columns, otherwise, onChange) {
    this.columns = columns;
    const sortable = columns.filter((column) => !column.fixed).map((column) => column.key);
    this.key = url.choice("sort", sortable, otherwise);
    const direction = url.get("dir");
    this.ascending = direction ? direction === "up" : Boolean(columns.find((column) => column.key === this.key)?.up);
    this.row = element("tr", "", ...columns.map((column) => this.head(column, url, onChange)));
    this.mark();
  }

  head(column, url, onChange) {
    const sort = () => {
      this.ascending = this.key === column.key ? !this.ascending : Boolean(column.up);
      this.key = column.key;
      url.update({ sort: this.key, dir: this.ascending ? "up" : "down" });
      this.mark();
      onChange();
    };
    const title = column.fixed ? column.title : button("", column.title, sort);
    return element("th", `c-${column.key}${column.number ? " number" : ""}`, { title: column.hint ?? null }, title);
  }

  mark() {
    for (const [index, column] of this.columns.entries())
      setAttributes(this.row.children[index], {
        "aria-sort": column.key === this.key ? (this.ascending ? "ascending" : "descending") : null,
      });
  }

  /** Order of two values; those that are missing come last whichever way the table is sorted. */
  compare(x, y) {
    const missing = (value) => (value === undefined || value === null || Number.isNaN(value) ? 1 : 0);
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    const order = x < y ? -1 : x > y ? 1 : 0;
    return this.ascending ? order : -order;
  }
}

/** What opens and closes a row for those who have no pointer: its text as a button. A click anywhere in the row does
 * the same, so that it needs no handler of its own. */
export function opener(text, isOpen) {
  return button("row-opener", text, () => null, { "aria-expanded": String(isOpen) });
}

/** A row whose one cell goes through all columns. */
export function wideRow(className, columns, ...content) {
  return element("tr", className, element("td", "", { colspan: columns }, ...content));
}
