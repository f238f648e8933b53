// Controls that several pages share: segmented controls, search boxes, and tables whose heads sort them.

import { scoreHint, scoreNames } from "./channels.js";
import { button, element, setAttributes } from "./dom.js";

let nextId = 0;

/**
 * Arrow keys move inside the group, as radio groups do. Returns a node with `choose(value)`, which does what a click
 * does, and `select(value)`, which sets the choice without calling onChange.
 * options: {value: label}, or a list of values that are their own labels; disabled: why some cannot be chosen.
 * @param {{label: string, options: Record<string, string> | string[], value: string,
 *   onChange: (value: string) => void, hint?: string, disabled?: Record<string, string>}} settings
 * @returns {HTMLElement & {choose(value: string): void, select(value: string): void}}
 */
export function segmentedControl({ label, options, value, onChange, hint = "", disabled = {} }) {
  const id = `control-${nextId++}`;
  const choices = Array.isArray(options) ? options.map((each) => [each, each]) : Object.entries(options);
  const buttons = choices.map(([own, words]) => {
    const state = { disabled: own in disabled, title: disabled[own] || null };
    return button("", words, () => choose(own), { role: "radio", "data-value": own, ...state });
  });
  const select = (chosen) => {
    for (const each of buttons) {
      const isChosen = each.dataset.value === chosen;
      setAttributes(each, { "aria-checked": String(isChosen), tabindex: isChosen ? 0 : -1 });
    }
  };
  const choose = (chosen) => {
    select(chosen);
    onChange(chosen);
  };
  const onkeydown = (event) => {
    const direction = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!direction) return;
    event.preventDefault();
    event.stopPropagation();
    const enabled = buttons.filter((each) => !each.disabled);
    const at = enabled.findIndex((each) => each.getAttribute("aria-checked") === "true");
    const next = enabled[(at + direction + enabled.length) % enabled.length];
    next.focus();
    choose(next.dataset.value);
  };
  select(value);
  const name = element("span", "control-label", { id }, label);
  const group = element("div", "segments", { role: "radiogroup", "aria-labelledby": id, onkeydown }, ...buttons);
  return Object.assign(element("div", "control", { title: hint || null }, name, group), { choose, select });
}

/** Which score is shown, of those that the trace holds; null where there is nothing to choose. */
export function scoreControl(value, scores, onChange) {
  if (scores.length < 2) return null;
  return segmentedControl({ label: "Score", value, hint: scoreHint(scores), options: scoreNames(scores), onChange });
}

/** The value after `current` in a list, for keys that cycle through a control. */
export function nextOf(values, current) {
  return values[(values.indexOf(current) + 1) % values.length];
}

/** onEnter is given whether Shift was held. */
export function searchBox(placeholder, label, value, onInput, onEnter = (_isBackwards) => {}) {
  const input = element("input", "", {
    type: "search",
    placeholder,
    "aria-label": label,
    value,
    spellcheck: "false",
    autocomplete: "off",
    oninput: () => onInput(input.value),
    onkeydown: (event) => event.key === "Enter" && onEnter(event.shiftKey),
  });
  return input;
}

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

  /** These rows in order by what `cellOf(row, key)` is; those without a value come last whichever way the table is
   * sorted. `ties(a, b, areMissing)` orders the rest. */
  sorted(rows, cellOf, ties) {
    return [...rows].sort((a, b) => {
      const [x, y] = [cellOf(a, this.key), cellOf(b, this.key)];
      const order = x < y === this.ascending ? -1 : 1;
      if (isMissing(x) || isMissing(y)) return Number(isMissing(x)) - Number(isMissing(y)) || ties(a, b, true);
      return x === y ? ties(a, b, false) : order;
    });
  }
}

function isMissing(value) {
  return value === undefined || value === null || Number.isNaN(value);
}

/** What opens and closes a row for those who have no pointer: its text as a button. A click anywhere in the row does
 * the same, so that it needs no handler of its own. */
export function opener(text, isOpen) {
  return button("row-opener", text, () => null, { "aria-expanded": String(isOpen) });
}
