// The ablation page: one row per combination of settings, and how far their token scores agree.

import { SCORE_NAMES } from "../channels.js";
import { SIGNED, levelName, levelOf } from "../colours.js";
import { Sorting } from "../controls.js";
import { element, factList, markCurrent, rowOf, tableOf } from "../dom.js";
import { MISSING, fixed, general, plural } from "../format.js";
import { extent } from "../statistics.js";
import { Page, neighbourIn, pageHead } from "./page.js";

const MEBIBYTE = 2 ** 20;

export async function openAblationPage(context) {
  const table = await context.source.json(`runs/${context.run.id}/ablation`);
  return () => new AblationPage(context, table);
}

/** A number of the table as people read it. */
function shown(key, value, unit = "") {
  if (value === null || value === undefined) return MISSING;
  if (typeof value !== "number") return String(value);
  if (key === "time_s") return `${fixed(value, 3)} s`;
  if (key === "peak_bytes") return `${fixed(value / MEBIBYTE, 1)} MiB`;
  return unit ? general(value) : fixed(value, 3);
}

class AblationPage extends Page {
  constructor(context, table) {
    super(context, "ablation", { "j k": "row", esc: "clear" }, "ablation-page");
    this.axes = Object.keys(table.sweep);
    const heads = [
      { key: "grid", title: "#", number: true, up: true },
      ...this.axes.map((axis) => ({ key: axis, title: axis, up: true })),
      ...table.columns.map(({ key, label }) => ({ key, title: label, number: true, up: true })),
    ];
    this.sorting = new Sorting(this.url, heads, "grid", () => this.drawTable());
    this.selected = this.url.number("sel");
    this.build(table);
  }

  build(table) {
    this.table = table;
    const { rollout, baseline, columns, cells } = table;
    const theta = table.checkpoint ? `checkpoint ${table.checkpoint}` : "the recipe's first weights";
    const sub = `One rollout of ${table.recipe} at ${theta}: ${plural(rollout.responses, "response")} to ${plural(rollout.prompts, "prompt")}, ${general(rollout.tokens)} tokens, ${general(rollout.groups_mixed)} mixed groups. Same tokens and weights in every row.`;
    const done = cells.filter((cell) => cell.status === "done").length;
    const facts = factList(
      [`${done} of ${cells.length}`, "combinations done"],
      [shown("time_s", baseline.time_s), "the pass without a trace"],
      [shown("peak_bytes", baseline.peak_bytes), "its memory"],
    );
    const meanings = columns.flatMap(({ label, meaning }) => [element("dt", "", label), element("dd", "", meaning)]);
    this.body = element("tbody");
    this.node.replaceChildren(
      pageHead(`Ablation ${table.name}`, sub, facts),
      tableOf("ablation-table", this.sorting.row, this.body),
      element("dl", "meanings", ...meanings),
      this.agreementSection(),
      element("p", "dim machine", table.machine),
    );
    this.drawTable();
  }

  /* ---------- the table ---------- */

  /** Where the combinations stand in the table, in the order shown. */
  get order() {
    const { cells } = this.table;
    const settingOf = (index, key) => (this.axes.includes(key) ? cells[index].settings[key] : cells[index][key]);
    const cellOf = (index, key) => (key === "grid" ? index : (settingOf(index, key) ?? null));
    const isNumber = cells.every((_, index) => !Number.isNaN(Number(cellOf(index, this.sorting.key) ?? 0)));
    const comparable = (index, key) => {
      const value = cellOf(index, key);
      return value === null ? null : isNumber ? Number(value) : String(value);
    };
    return this.sorting.sorted(cells.keys(), comparable, (a, b) => a - b);
  }

  /** The best value of every column that has a better side. */
  best() {
    const best = new Map();
    for (const { key, better } of this.table.columns) {
      const values = this.table.cells.map((cell) => cell[key]).filter(Number.isFinite);
      if (values.length > 1 && better) best.set(key, extent(values)[better === "lower" ? 0 : 1]);
    }
    return best;
  }

  drawTable() {
    const best = this.best();
    this.rows = new Map(this.order.map((index) => [index, this.row(this.table.cells[index], index, best)]));
    this.body.replaceChildren(...this.rows.values());
  }

  row(cell, index, best) {
    const { columns } = this.table;
    const isSelected = this.selected === index;
    const values = columns.map(({ key, unit }) => [
      `number${best.get(key) === cell[key] ? " best" : ""}`,
      shown(key, cell[key], unit),
    ]);
    const why = cell.error ? `${cell.status}: ${cell.error}` : cell.status;
    return rowOf(
      `opens${isSelected ? " current" : ""}`,
      { "data-cell": index, onclick: () => this.select(isSelected ? null : index) },
      ["number", String(index + 1)],
      ...this.axes.map((axis) => ["mono", String(cell.settings[axis])]),
      ...(cell.status === "done" ? values : [["dim reason", { colspan: columns.length }, why]]),
    );
  }

  select(index) {
    this.selected = index;
    this.url.update({ sel: index });
    this.drawTable();
    this.markMatrix();
    markCurrent(this.rows.values(), this.rows.get(index));
  }

  /* ---------- agreement ---------- */

  agreementSection() {
    const { names, matrix, measure, score } = this.table.agreement;
    const scores = score === "mixed" ? "each with its own score" : (SCORE_NAMES[score] ?? score);
    const section = element("section", "agreement", element("h2", "section-title", "Agreement"));
    if (names.length < 2) {
      section.append(element("p", "dim", "At least two combinations must be done."));
      return section;
    }
    this.places = names.map((name) => this.table.cells.findIndex((cell) => cell.name === name));
    const heads = this.places.map((index) => element("th", "number", String(index + 1)));
    const lines = matrix.map((row, i) => {
      const head = element("th", "number", { title: names[i] }, String(this.places[i] + 1));
      return element("tr", "", head, ...row.map((value, j) => this.matrixCell(value, i, j, names)));
    });
    this.matrix = tableOf("matrix", element("tr", "", element("td"), ...heads), element("tbody", "", ...lines));
    const how = "Point at a cell to read which two combinations it compares; numbers are those of the table.";
    this.pair = element("p", "pair dim", how);
    const what = `Rank correlation (${measure}) of all token scores (${scores}). 1: the same order.`;
    section.append(element("p", "dim", what), element("div", "matrix-scroll", this.matrix), this.pair);
    this.markMatrix();
    return section;
  }

  matrixCell(value, i, j, names) {
    const onpointerenter = () => {
      this.pair.textContent = `${names[i]}  against  ${names[j]}: ${Number.isFinite(value) ? fixed(value, 4) : "not known"}`;
    };
    const onclick = () => this.select(this.places[i]);
    const colour = levelName(SIGNED, levelOf(SIGNED, value, 1));
    return element("td", `number ${colour}`, { onpointerenter, onclick }, fixed(value, 2));
  }

  /** Row and column of the selected combination. */
  markMatrix() {
    if (!this.matrix) return;
    const at = this.places.indexOf(this.selected);
    for (const [i, row] of [...this.matrix.tBodies[0].rows].entries()) {
      row.classList.toggle("chosen", i === at);
      for (const [j, cell] of [...row.cells].entries()) cell.classList.toggle("chosen", at >= 0 && j === at + 1);
    }
  }

  /* ---------- living ---------- */

  async update() {
    this.build(await this.context.source.json(`runs/${this.context.run.id}/ablation`));
  }

  get actions() {
    const move = (direction) => this.select(neighbourIn(this.order, this.selected, direction));
    return { j: () => move(1), k: () => move(-1), Escape: () => this.select(null) };
  }
}
