// The tokens page: a leaderboard of distinct tokens beside entropy × influence; brushing one filters the other.

import { Sorting, scoreControl, searchBox } from "../controls.js";
import { button, divergingBar, element, filledBar, linkTo, rowOf, tableOf, wideRow } from "../dom.js";
import { MISSING, count, fixed, scoreSentence, scoreStyle, withUnit } from "../format.js";
import { Scatter } from "../plots.js";
import { largestSize, occurrencesOf, placeOf, startsOf, tokenStatistics } from "../statistics.js";
import { readVocabulary, visibleText } from "../text.js";
import { Page, pageHead, problemNotes } from "./page.js";

const LEAST_SEEN = ["1", "4", "32"];
const BOTH_ENDS = 11;
const MOST_ROWS = 60;
const MOST_OCCURRENCES = 24;

const WITHOUT_INFLUENCE =
  "No influence in this step: no group was mixed, or the influence trace was off. Counts and entropy are shown.";

/** @param {{unit: string}} mean how mean influence is written @param {{unit: string}} size how its sum is */
const columnsOf = (mean, size) => [
  { key: "text", title: "Token", up: true },
  { key: "count", title: "Count", number: true },
  { key: "mean", title: `Mean influence${mean.unit && `, ${mean.unit}`}`, number: true, up: true },
  { key: "bar", title: "below 0 or above", fixed: true },
  { key: "entropy", title: "Mean entropy, nats" },
  { key: "size", title: `Σ |influence|${size.unit && `, ${size.unit}`}`, number: true },
];

export async function openTokensPage(context) {
  const { source, run, step, url } = context;
  const path = `runs/${run.id}/steps/${step}`;
  const structure = await source.json(`${path}/tokens`);
  const score = url.choice("score", structure.scores, structure.scores[0] ?? "influence");
  const points = readPoints(structure, await source.floats(`${path}/points?score=${score}`));
  return () => new TokensPage(context, structure, score, points);
}

function readPoints(structure, floats) {
  const { responses, stride } = structure;
  const size = floats.length / 3;
  const starts = startsOf(responses.map(({ length }) => length));
  const owner = Uint32Array.from({ length: size }, (_, at) => placeOf(starts, at * stride));
  return {
    token: floats.subarray(0, size),
    entropy: floats.subarray(size, 2 * size),
    influence: floats.subarray(2 * size),
    accepted: (at) => responses[owner[at]].accepted,
    place: (at) => ({ ...responses[owner[at]], position: at * stride - starts[owner[at]] }),
  };
}

const HINTS = { drag: "brush", esc: "clear", "[ ]": "step", "/": "filter" };

class TokensPage extends Page {
  constructor(context, structure, score, points) {
    super(context, `tokens, step ${structure.step}`, HINTS);
    this.structure = structure;
    this.score = score;
    /** Of scores: nats, or that of captured factors. */
    this.unit = structure.meta.unit;
    this.points = points;
    this.vocabulary = readVocabulary(structure.vocabulary);
    this.texts = this.vocabulary.map((entry) => visibleText(entry));
    this.hasInfluence = structure.scores.length > 0;
    const everything = tokenStatistics(points, () => true);
    const styleOf = (name) => scoreStyle(this.unit, largestSize(everything.map((entry) => entry[name])), 3);
    this.styles = { mean: styleOf("mean"), size: styleOf("size") };
    this.columns = columnsOf(this.styles.mean, this.styles.size);
    this.sorting = new Sorting(this.url, this.columns, this.hasInfluence ? "mean" : "entropy", () => this.list());
    this.min = this.url.choice("min", LEAST_SEEN, "4");
    this.query = this.url.get("q") ?? "";
    this.opened = this.url.number("token");
    this.brush = readBrush(this.url.get("brush"));
    this.build();
  }

  build() {
    const { structure } = this;
    const distinct = new Set(this.points.token).size;
    const sample = structure.stride > 1 ? ` A regular sample of them is shown: one in ${structure.stride}.` : "";
    const where = this.hasInfluence
      ? `in ${structure.scored_groups} scored groups`
      : `in ${structure.scored_groups} groups, none of them scored`;
    const sub = `Step ${structure.step}, ${count(structure.total)} response tokens ${where}, ${count(distinct)} distinct.${sample}`;
    const meaning = this.hasInfluence ? `${sub} ${scoreSentence(structure.meta, this.score)}` : sub;
    this.node.append(pageHead("Tokens", meaning));
    this.node.append(...problemNotes(structure));
    if (!this.hasInfluence) this.node.append(element("p", "strip notice", WITHOUT_INFLUENCE));
    this.node.append(this.makeControls());
    this.body = element("tbody");
    const table = element("div", "", tableOf("", this.sorting.row, this.body));
    this.line = element("div", "brush-line");
    this.fields = element("div", "brush-fields");
    this.scatter = new Scatter(this.points, this.unit, (brush) => this.setBrush(brush));
    const plot = element("div", "scatter", this.line, this.scatter.node, this.fields);
    this.node.append(element("div", "tokens-page", table, plot));
  }

  makeControls() {
    const box = searchBox("Filter tokens", "Filter tokens by their text", this.query, (value) => {
      this.query = value;
      this.url.update({ q: value });
      this.list();
    });
    const least = this.choiceOf("Seen at least", "min", LEAST_SEEN, () => this.list());
    const scores = scoreControl(this.score, this.structure.scores, (score) => {
      this.url.update({ score, brush: null });
      this.context.go("tokens", { score, q: this.query, sort: this.sorting.key, min: this.min });
    });
    const how = "Drag on the plot to restrict the table. Click a token to see where it stands.";
    const parts = [scores, element("span", "grow"), element("span", "dim wide-only", how)];
    return element("div", "controls strip", box, least, ...parts);
  }

  mounted() {
    this.drawToWidth(this.scatter.node, () => this.scatter.draw(this.brush));
    this.list();
  }

  setBrush(brush) {
    this.brush = brush;
    const numbers = brush && [...brush.entropy, ...brush.influence].map((value) => Number(value.toPrecision(4)));
    this.url.update({ brush: numbers?.join("_") ?? null });
    this.scatter.draw(brush);
    this.list();
  }

  /* ---------- the table ---------- */

  list() {
    const everything = tokenStatistics(this.points, (at) => this.scatter.contains(at));
    const query = this.query.toLowerCase();
    const matches = ({ index, count: seen }) =>
      seen >= Number(this.min) &&
      (!query ||
        this.texts[index].toLowerCase().includes(query) ||
        (this.vocabulary[index].text ?? "").toLowerCase().includes(query));
    const value = (entry, key) => (key === "text" ? this.texts[entry.index] : entry[key]);
    const entries = this.sorting.sorted(everything.filter(matches), value, (a, b) => a.index - b.index);
    const top = (name) =>
      largestSize(
        entries.map((entry) => entry[name]),
        1e-12,
      );
    const tops = { mean: top("mean"), entropy: top("entropy"), size: top("size") };
    this.body.replaceChildren(...this.visibleRows(entries, tops));
    this.showBrushLine(everything.reduce((sum, entry) => sum + entry.count, 0));
    this.showFields();
  }

  /** The rows to show: sorted by mean influence both ends matter, so the middle is folded. */
  visibleRows(entries, tops) {
    const why = this.query ? `No token matches “${this.query}”.` : "No token was seen that often here.";
    if (!entries.length) return [wideRow("dim", this.columns.length, why)];
    const fold = this.sorting.key === "mean" && entries.length > 2 * BOTH_ENDS + 8;
    const first = fold ? entries.slice(0, BOTH_ENDS) : entries.slice(0, MOST_ROWS);
    const rows = first.flatMap((entry) => this.rowsOf(entry, tops));
    if (fold) {
      rows.push(wideRow("between", this.columns.length, `${count(entries.length - 2 * BOTH_ENDS)} tokens in between`));
      rows.push(...entries.slice(-BOTH_ENDS).flatMap((entry) => this.rowsOf(entry, tops)));
    } else if (entries.length > MOST_ROWS)
      rows.push(
        wideRow("between", this.columns.length, `${count(entries.length - MOST_ROWS)} more; filter to see them`),
      );
    return rows;
  }

  rowsOf(entry, tops) {
    const isOpen = this.opened === this.vocabulary[entry.index].id;
    const text = element("span", "token-chip", this.texts[entry.index]);
    const chip = button("link-button", text, () => this.toggle(entry.index), { "aria-expanded": String(isOpen) });
    const entropyBar = element("span", "", filledBar("e4", entry.entropy / tops.entropy));
    const entropy = element("div", "with-bar", element("b", "", fixed(entry.entropy, 2)), entropyBar);
    const row = rowOf(
      "opens",
      { onclick: (event) => !event.target.closest("button") && this.toggle(entry.index) },
      ["c-text", chip],
      ["c-count number", count(entry.count)],
      ["c-mean number", this.styles.mean.signed(entry.mean)],
      ["c-bar", Number.isFinite(entry.mean) ? divergingBar(entry.mean, tops.mean) : ""],
      ["c-entropy", Number.isFinite(entry.entropy) ? entropy : MISSING],
      ["c-size number", entry.scored ? this.styles.size.plain(entry.size) : MISSING],
    );
    return isOpen ? [row, this.occurrenceRow(entry.index)] : [row];
  }

  toggle(index) {
    const { id } = this.vocabulary[index];
    this.opened = this.opened === id ? null : id;
    this.url.update({ token: this.opened });
    this.list();
  }

  occurrenceRow(index) {
    const { total, shown } = occurrencesOf(this.points, index, (at) => this.scatter.contains(at), MOST_OCCURRENCES);
    const words = total > shown.length ? `The strongest ${shown.length} of ${count(total)}: ` : "Where it stands: ";
    const row = wideRow("occurrences", this.columns.length, words);
    const style = scoreStyle(this.unit, this.scatter.top);
    for (const { group, response, position, influence } of shown) {
      const score = Number.isFinite(influence) ? `  ${withUnit(style.signed(influence), style)}` : "";
      const href = this.context.href("group", { group, sel: `${response}.${position}` });
      row.children[0].append(linkTo(href, "", `group ${group}, r${response} at ${position}${score}`));
    }
    return row;
  }

  /* ---------- the brush in words and fields ---------- */

  showBrushLine(chosen) {
    if (!this.brush) return this.line.replaceChildren(element("span", "dim", `All ${count(chosen)} tokens`));
    const { entropy, influence } = this.brush;
    const style = scoreStyle(this.unit, this.scatter.top, 2);
    const words = `entropy ${fixed(entropy[0], 2)} to ${fixed(entropy[1], 2)} nats, influence ${style.signed(influence[0])} to ${withUnit(style.signed(influence[1]), style)}`;
    this.line.replaceChildren(
      element("b", "", `${count(chosen)} tokens`),
      element("span", "mid", words),
      button("link-button", "clear", () => this.setBrush(null)),
    );
  }

  /** The brush without a pointer. */
  showFields() {
    if (this.fields.contains(document.activeElement)) return;
    const { horizontal, vertical } = this.scatter;
    const whole = { entropy: [horizontal.low, horizontal.high], influence: [vertical.low, vertical.high] };
    const shown = this.brush ?? whole;
    const field = (axis, end, label) => {
      const onchange = () => {
        input.blur();
        this.setBrush({ ...shown, [axis]: shown[axis].with(end, Number(input.value)) });
      };
      const value = Number(shown[axis][end].toPrecision(3));
      const words = { "aria-label": `${axis} ${label}` };
      const input = element("input", "", { type: "number", step: "any", value, ...words, onchange });
      return input;
    };
    const range = (axis, unit = "") => [axis + unit, field(axis, 0, "from"), "to", field(axis, 1, "to")];
    this.fields.replaceChildren(...range("entropy"), ...range("influence", this.unit === "nats" ? ", nats" : ""));
  }

  retheme() {
    this.scatter.draw();
  }

  get actions() {
    return { Escape: () => this.brush !== null && this.setBrush(null) };
  }
}

/** "0.9_2.9_-0.4_0.4" → a brush, or null. */
function readBrush(text) {
  const numbers = (text ?? "").split("_").map(Number);
  if (numbers.length !== 4 || !numbers.every(Number.isFinite)) return null;
  return { entropy: numbers.slice(0, 2), influence: numbers.slice(2) };
}
