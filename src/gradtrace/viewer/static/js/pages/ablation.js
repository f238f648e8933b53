// The ablation page: one row per combination of settings, and how far their token scores agree.

import { element, fact, tableOf } from "../dom.js";
import { fixed, general, MISSING, plural } from "../format.js";
import { neighbourIn, Page, pageHead } from "../page.js";
import { signedClass, signedClassName } from "../scales.js";
import { Sorting } from "../sorting.js";

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
    this.table = table;
    this.axes = Object.keys(table.sweep);
    this.columns = table.columns.filter((column) => typeof column.key === "string");
    const heads = [
      { key: "grid", title: "#", number: true, up: true },
      ...this.axes.map((axis) => ({ key: axis, title: axis, up: true })),
      ...this.columns.map(({ key, label }) => ({ key, title: label ?? key, number: true, up: true })),
    ];
    this.sorting = new Sorting(this.url, heads, "grid", () => this.drawTable());
    this.selected = this.url.number("sel");
    this.build();
  }

  build() {
    const { table } = this;
    const { rollout, baseline } = table;
    const theta = table.checkpoint ? `checkpoint ${table.checkpoint}` : "the recipe's first weights";
    const sub = `One rollout of ${table.recipe} at ${theta}: ${plural(rollout.responses ?? 0, "response")} to ${plural(rollout.prompts ?? 0, "prompt")}, ${general(rollout.tokens)} tokens, ${general(rollout.groups_mixed)} mixed groups. Same tokens and weights in every row.`;
    const done = table.cells.filter((cell) => cell.status === "done").length;
    const facts = element(
      "div",
      "facts",
      fact(`${done} of ${table.cells.length}`, "combinations done"),
      fact(shown("time_s", baseline.time_s), "the pass without a trace"),
      fact(shown("peak_bytes", baseline.peak_bytes), "its memory"),
    );
    this.body = element("tbody");
    this.node.append(
      pageHead(`Ablation ${table.name}`, sub, facts),
      tableOf("ablation-table", this.sorting.row, this.body),
      this.meanings(),
      this.agreementSection(),
    );
    if (table.machine) this.node.append(element("p", "dim machine", String(table.machine)));
    this.drawTable();
  }

  meanings() {
    const list = element("dl", "meanings");
    for (const { label, key, meaning } of this.columns)
      list.append(element("dt", "", label ?? key), element("dd", "", meaning ?? ""));
    return list;
  }

  /* ---------- the table ---------- */

  get cells() {
    const numbered = this.table.cells.map((cell, index) => ({ cell, index }));
    const { key } = this.sorting;
    const value = ({ cell, index }) =>
      key === "grid" ? index : this.axes.includes(key) ? cell.settings?.[key] : cell[key];
    const isNumber = numbered.every((each) => !Number.isNaN(Number(value(each) ?? 0)));
    const comparable = (each) => {
      const found = value(each) ?? null;
      return found === null ? null : isNumber ? Number(found) : String(found);
    };
    return numbered.sort((a, b) => this.sorting.compare(comparable(a), comparable(b)) || a.index - b.index);
  }

  /** The best value of every column that has a better side. */
  best() {
    const best = new Map();
    for (const { key, better } of this.columns) {
      const values = this.table.cells.map((cell) => cell[key]).filter(Number.isFinite);
      if (values.length > 1 && better === "lower") best.set(key, Math.min(...values));
      if (values.length > 1 && better === "higher") best.set(key, Math.max(...values));
    }
    return best;
  }

  drawTable() {
    const best = this.best();
    this.body.replaceChildren(...this.cells.map(({ cell, index }) => this.row(cell, index, best)));
  }

  row(cell, index, best) {
    const isSelected = this.selected === index;
    const settings = this.axes.map((axis) => element("td", "mono", String(cell.settings?.[axis] ?? MISSING)));
    const values = this.columns.map(({ key, unit }) => {
      const isBest = best.get(key) === cell[key];
      return element("td", `number${isBest ? " best" : ""}`, shown(key, cell[key], unit));
    });
    const why = cell.error ? `${cell.status}: ${cell.error}` : String(cell.status);
    const reason = element("td", "dim reason", { colspan: this.columns.length }, why);
    return element(
      "tr",
      `opens${isSelected ? " current" : ""}`,
      { "data-cell": index, onclick: () => this.select(isSelected ? null : index) },
      element("td", "number", String(index + 1)),
      ...settings,
      ...(cell.status === "done" ? values : [reason]),
    );
  }

  select(index) {
    this.selected = index;
    this.url.update({ sel: index });
    this.drawTable();
    this.markMatrix();
    this.body.querySelector("tr.current")?.scrollIntoView({ block: "nearest" });
  }

  /* ---------- agreement ---------- */

  agreementSection() {
    const { names, matrix, measure, credit } = this.table.agreement;
    const credits =
      credit === "mixed" ? "each with its own credit" : `${String(credit ?? "").replace("_", " ")} credit`;
    const section = element("section", "agreement", element("h2", "section-title", "Agreement"));
    if (names.length < 2) {
      section.append(element("p", "dim", "At least two combinations must be done."));
      return section;
    }
    const place = new Map(this.table.cells.map((cell, index) => [cell.name, index]));
    this.places = names.map((name) => place.get(name));
    const numbers = this.places.map((index) => (index === undefined ? "?" : String(index + 1)));
    const heads = numbers.map((number) => element("th", "number", number));
    const lines = matrix.map((row, i) => {
      const head = element("th", "number", { title: String(names[i]) }, numbers[i]);
      return element("tr", "", head, ...row.map((value, j) => this.matrixCell(value, i, j, names)));
    });
    this.matrix = tableOf("matrix", element("tr", "", element("td"), ...heads), element("tbody", "", ...lines));
    const how = "Point at a cell to read which two combinations it compares; numbers are those of the table.";
    this.pair = element("p", "pair dim", how);
    const what = `Rank correlation (${measure ?? "spearman"}) of all token scores, ${credits}. 1: the same order.`;
    section.append(element("p", "dim", what), element("div", "matrix-scroll", this.matrix), this.pair);
    this.markMatrix();
    return section;
  }

  matrixCell(value, i, j, names) {
    const level = Number.isFinite(value) ? signedClass(value, 1) : 0;
    const onpointerenter = () => {
      this.pair.textContent = `${names[i]}  against  ${names[j]}: ${Number.isFinite(value) ? fixed(value, 4) : "not known"}`;
    };
    const onclick = () => this.places[i] !== undefined && this.select(this.places[i]);
    return element("td", `number ${signedClassName(level)}`, { onpointerenter, onclick }, fixed(value, 2));
  }

  /** Row and column of the selected combination. */
  markMatrix() {
    if (!this.matrix) return;
    const at = this.places.indexOf(this.selected);
    [...this.matrix.tBodies[0].rows].forEach((row, i) => {
      row.classList.toggle("chosen", i === at);
      for (const [j, cell] of [...row.cells].entries()) cell.classList.toggle("chosen", at >= 0 && j === at + 1);
    });
  }

  /* ---------- living ---------- */

  async update() {
    this.table = await this.context.source.json(`runs/${this.context.run.id}/ablation`);
    this.node.replaceChildren();
    this.build();
  }

  move(direction) {
    const order = this.cells.map(({ index }) => index);
    this.select(neighbourIn(order, this.selected, direction));
  }

  get actions() {
    return { j: () => this.move(1), k: () => this.move(-1), Escape: () => this.select(null) };
  }
}
