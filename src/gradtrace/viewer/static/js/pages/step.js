// The step page: the prompt groups of one step as a table to sort and filter.

import { Frame, LinearScale } from "../charts.js";
import { SIGNED, levelName, levelOf, rampOf } from "../colours.js";
import { Sorting, scoreControl, searchBox } from "../controls.js";
import {
  cssColours,
  element,
  factList,
  filledBar,
  fitCanvas,
  linkTo,
  markCurrent,
  passDots,
  rowOf,
  svgDot,
  svgElement,
  svgLine,
  svgPath,
  tableOf,
  wideRow,
} from "../dom.js";
import { MISSING, fixed, plural, question, scoreSentence, scoreStyle, sharedStart } from "../format.js";
import { overheadOf } from "../run_charts.js";
import { extent, largestSize, meanOf, startsOf } from "../statistics.js";
import { Page, pageHead, problemNotes } from "./page.js";

/** Which groups are shown. */
const SHOW = {
  all: () => true,
  mixed: (group) => !group.constant,
  skipped: (group) => group.status !== "scored",
};
const LONG_PROMPT = 40;

const WHY_SKIPPED = {
  constant_reward: "skipped: all rewards equal",
  over_prompt_cap: "skipped: over max_prompts_per_step",
  non_finite: "skipped: gradient not finite",
  not_captured: "skipped: no token captured",
  not_asked: "not scored: others were asked for",
};

const MEASURED_HINT =
  "Measured change of the group’s objective by the optimizer step; momentum and weight decay are part of it.";
const COLUMNS = [
  { key: "group", title: "Group", up: true },
  { key: "prompt", title: "Prompt", up: true },
  { key: "accepted", title: "Pass rate" },
  { key: "map", title: "Influence by position", fixed: true },
  { key: "entropy", title: "Entropy, nats" },
  { key: "sum", title: "Σ influence" },
  { key: "change", title: "Measured", number: true, hint: MEASURED_HINT },
  { key: "length", title: "Mean length", number: true },
];

export async function openStepPage(context) {
  const { source, run, step } = context;
  const path = `runs/${run.id}/steps/${step}`;
  const table = await source.json(path);
  const score = context.url.choice("score", table.scores, table.scores[0] ?? null);
  const pictures = await loadMiniatures(source, path, score);
  return () => new StepPage(context, table, path, score, pictures);
}

async function loadMiniatures(source, path, score) {
  return score ? source.floats(`${path}/miniatures?score=${score}`) : null;
}

const HINTS = { "j k": "row", "↵": "open", "[ ]": "step", "/": "filter" };

class StepPage extends Page {
  constructor(context, table, path, score, pictures) {
    super(context, `step ${table.step}`, HINTS);
    this.table = table;
    this.path = path;
    this.score = score;
    this.pictures = pictures;
    const sums = table.groups.flatMap((group) => [this.value(group, "sum"), group.change ?? NaN]);
    this.style = scoreStyle(table.meta.unit, largestSize(sums, 0));
    this.isMeasured = table.groups.some((group) => group.change !== undefined);
    this.columns = this.makeColumns();
    this.sorting = new Sorting(this.url, this.columns, table.has_influence ? "sum" : "group", () => this.fill());
    this.show = this.url.choice("show", Object.keys(SHOW));
    this.query = this.url.get("q") ?? "";
    this.current = -1;
    /** Where each group's picture begins, and what all prompts have in common. */
    this.starts = startsOf(table.groups.map((group) => group.columns * group.responses));
    this.cut = sharedStart(table.groups.map((group) => group.prompt));
    this.body = element("tbody");
    const isProse = table.groups.some((group) => group.prompt.length - this.cut > LONG_PROMPT);
    this.node.append(
      this.makeHead(),
      element("p", "story", table.story),
      ...this.makeNotices(),
      this.makeControls(),
      tableOf(`fixed steps${isProse ? " prose" : ""}`, this.sorting.row, this.body),
    );
    this.fill();
  }

  /** Its columns: with measured changes where there are any, and the unit of both. */
  makeColumns() {
    const unit = this.style.unit ? `, ${this.style.unit}` : "";
    const titles = { sum: `Σ influence${unit}`, change: `Measured${unit}` };
    const shown = COLUMNS.filter(({ key }) => key !== "change" || this.isMeasured);
    return shown.map((column) => ({ ...column, title: titles[column.key] ?? column.title }));
  }

  makeHead() {
    const { groups, responses, step, has_influence: traced, has_entropy: hasEntropy } = this.table;
    const scored = groups.filter((group) => group.status === "scored").length;
    const mixed = groups.filter((group) => !group.constant).length;
    const influence = traced
      ? `Influence, ${question(this.table.meta)}, is computed in the ${scored} whose rewards differ${scored < mixed ? ` (${mixed - scored} of them skipped)` : ""}.`
      : "";
    const sub = `${plural(groups.length, "prompt group")}, ${plural(responses, "response")}. ${influence}`;
    const overhead = overheadOf(this.run.rows.get(step) ?? {});
    const { updates = [] } = this.table.meta;
    const part = updates.reduce((sum, each) => sum + each.part, 0);
    const ratio = this.run.rows.get(step)?.["influence_trace/predicted_over_measured"];
    const facts = factList(
      [fixed(meanOf(groups.map((group) => group.reward)), 2), "reward"],
      hasEntropy ? [fixed(meanOf(groups.map((group) => group.entropy)), 3), "entropy, nats"] : null,
      [`${mixed} of ${groups.length}`, "mixed groups"],
      Number.isFinite(part) && updates.length ? [this.style.signed(part), `Σ influence, ${this.style.unit}`] : null,
      Number.isFinite(ratio) ? [fixed(ratio, 2), "predicted / measured"] : null,
      overhead === undefined ? null : [`+${fixed(100 * overhead, 1)} %`, "tracing overhead"],
    );
    return pageHead(`Step ${step}`, sub, this.spark(), facts);
  }

  /** Where this step is in the run. */
  spark() {
    const points = this.run.series("critic/rewards/mean");
    if (points.length < 2) return null;
    const [width, height] = [220, 40];
    const frame = new Frame(width, height, { left: 4, right: 4, top: 7, bottom: 5 });
    const steps = new LinearScale(points[0].step, points.at(-1).step);
    const rewards = new LinearScale(...extent(points.map((point) => point.value)));
    const place = ({ step, value }) => [frame.x(steps.at(step)), frame.y(rewards.at(value))];
    const here = points.filter((point) => point.step === this.table.step).map(place);
    const marks = here.flatMap(([x, y]) => [svgLine(x, 2, x, height, "crosshair"), svgDot(x, y, 3.5, "dot run-0")]);
    const curve = svgPath(points.map(place), "line run-0");
    const drawing = svgElement("svg", { width, height, "aria-hidden": "true" }, curve, ...marks);
    return element("div", "spark wide-only", "reward", drawing);
  }

  makeNotices() {
    const { vocabulary_problem: problem } = this.run;
    const why = this.whyNoInfluence();
    return [
      ...problemNotes(this.table),
      problem ? element("p", "notice", problem) : null,
      why ? element("p", "strip notice", why) : null,
      ...this.table.remarks.map((remark) => element("p", "notice", remark)),
    ].filter(Boolean);
  }

  /** Why no group of this step has influence, in words; empty where one has it. */
  whyNoInfluence() {
    const { groups, has_influence: traced, problems, meta } = this.table;
    if (!traced && problems.length) return "";
    if (!traced)
      return this.run.enabled.influence_trace === false
        ? "No influence: the influence trace was off in this run (trainer.influence_trace.enable=true turns it on)."
        : "No influence trace of this step: it is still being written, or the step is no multiple of its write_every.";
    if (meta.empty) return `No influence in this step: ${meta.empty}.`;
    if (groups.some((group) => group.status === "scored")) return "";
    return groups.every((group) => group.status === "constant_reward")
      ? "No mixed group in this step: in every group all rewards are equal, so there is nothing to contrast and no influence."
      : "No group of this step was scored; the table says why for each.";
  }

  makeControls() {
    const search = searchBox(
      "Filter:  *4-   pass<4   ent>0.2",
      "Filter groups by words of the prompt, or pass, ent, len, inf, reward compared with a number",
      this.query,
      (value) => {
        this.query = value;
        this.url.update({ q: value });
        this.fill();
      },
      () => search.blur(),
    );
    this.count = element("span", "", { "aria-live": "polite" });
    const show = this.choiceOf("Show", "show", Object.keys(SHOW), () => this.fill());
    const scores = scoreControl(this.score, this.table.scores, (value) => this.setScore(value));
    const tail = element("span", "tail", this.table.scores.length ? this.sumKey() : null, this.count);
    return element("div", "controls strip step-controls", search, show, scores, tail);
  }

  sumKey() {
    const title = scoreSentence(this.table.meta, this.score);
    const name = element("span", "hint", { title }, "Σ influence:");
    const parts = [element("span", "swatch p3"), "positive part", element("span", "swatch n3"), "negative part"];
    return element("span", "", name, ...parts);
  }

  async setScore(score) {
    this.pictures = await loadMiniatures(this.context.source, this.path, score);
    this.score = score;
    this.url.update({ score });
    this.fill();
  }

  influence(group) {
    return group[this.score] ?? null;
  }

  /** What a group has in a column, or by a name that the filter knows. */
  value(group, name) {
    const sums = this.influence(group);
    const sum = sums ? sums.positive - sums.negative : NaN;
    const own = { accepted: group.passed / group.responses, pass: group.passed, sum, inf: sum };
    return own[name] ?? group[{ ent: "entropy", len: "length" }[name] ?? name];
  }

  fill() {
    const { groups } = this.table;
    const matches = groupFilter(this.query, (group, name) => this.value(group, name));
    const shown = groups.filter((group) => SHOW[this.show](group) && matches(group));
    this.shown = this.sorting.sorted(
      shown,
      (group, key) => this.value(group, key),
      (a, b, areMissing) => (areMissing ? b.passed - a.passed : 0) || a.group - b.group,
    );
    this.count.textContent = `${this.shown.length} of ${plural(groups.length, "group")}`;
    const top = (name) =>
      largestSize(
        groups.map((group) => this.value(group, name) ?? NaN),
        1e-9,
      );
    const sides = groups.flatMap((group) => Object.values(this.influence(group) ?? {}));
    const tops = { entropy: top("entropy"), side: largestSize(sides, 1e-300) };
    this.body.replaceChildren(...this.shown.map((group, index) => this.row(group, index, tops)));
    if (this.shown.length) return;
    const why = this.query ? `No group matches “${this.query}”.` : `No ${this.show} group in this step.`;
    this.body.append(wideRow("dim", this.columns.length, why));
  }

  /** Was influence traced in this step, and this group left out? */
  isSkipped(group) {
    return this.table.has_influence && group.status !== "scored";
  }

  row(group, index, tops) {
    const link = linkTo(this.context.href("group", { group: group.group }), "", String(group.group));
    const prompt = `${this.cut ? "…" : ""}${group.prompt.slice(this.cut)}`;
    const passed = element("span", "dim", `\u2002${group.passed}/${group.responses}`);
    const isThere = !this.context.groups || this.context.groups.includes(group.group);
    const onclick = () => this.context.go("group", { group: group.group });
    return rowOf(
      `${isThere ? "opens" : "absent"}${this.isSkipped(group) ? " skipped" : ""}${index === this.current ? " current" : ""}`,
      isThere ? { onclick } : { title: "This group is not part of the report" },
      ["c-group dim", isThere ? link : String(group.group)],
      ["c-prompt prompt-cell", { title: group.prompt }, prompt],
      ["c-accepted", passDots(group.passed, group.responses), passed],
      this.pictureCell(group),
      ["c-entropy", this.entropyBar(group, tops.entropy)],
      ["c-sum", this.sumBars(group, tops.side)],
      ...(this.isMeasured ? [["c-change number", this.style.signed(group.change ?? NaN)]] : []),
      ["c-length number", fixed(group.length, 1)],
    );
  }

  pictureCell(group) {
    const isLeftOut = group.status === "constant_reward" && !group.constant; // its rewards differed before selection
    const why = isLeftOut
      ? "skipped: TracIn left no contrast"
      : (WHY_SKIPPED[group.status] ?? (this.table.has_influence ? "not traced" : ""));
    if (!this.pictures || group.status !== "scored") return ["c-map reason", { title: why || null }, why];
    if (!this.influence(group)) return ["c-map reason", "no scores"];
    const start = this.starts[group.group];
    const values = this.pictures.subarray(start, start + group.columns * group.responses);
    return ["c-map", miniature(values, group, this.table.scales[this.score])];
  }

  entropyBar(group, top) {
    if (group.entropy === undefined) return MISSING;
    const bar = filledBar("", group.entropy / top);
    bar.style.background = `var(--${this.isSkipped(group) ? "line2" : "e3"})`;
    return element("div", "with-bar", element("b", "", fixed(group.entropy, 3)), element("span", "", bar));
  }

  sumBars(group, top) {
    const sums = this.influence(group);
    if (!sums) return MISSING;
    const parts = { p3: sums.positive, n3: sums.negative };
    const bars = Object.entries(parts).map(([name, value]) => filledBar(name, (0.5 * value) / top));
    const number = element("b", "", this.style.signed(this.value(group, "sum")));
    return element("div", "with-bar", number, element("span", "", ...bars));
  }

  retheme() {
    this.fill();
  }

  move(direction) {
    this.current = Math.max(0, Math.min(this.shown.length - 1, this.current + direction));
    markCurrent(this.body.children, this.body.children[this.current]);
    const { group, prompt } = this.shown[this.current] ?? {};
    this.context.announce(`group ${group}, ${prompt?.slice(this.cut, this.cut + 80)}`);
  }

  open() {
    const chosen = this.shown[this.current];
    return chosen ? this.context.go("group", { group: chosen.group }) : false;
  }

  get actions() {
    return { j: () => this.move(1), k: () => this.move(-1), Enter: () => this.open() };
  }
}

const CONDITION = /^(pass|ent|len|inf|reward)(<=|>=|<|>|=)(-?\d+(?:\.\d+)?)$/;

/** A function group → boolean. Every term must hold; terms that are no condition are looked for in the prompt. */
function groupFilter(text, measure) {
  const terms = text.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const tests = terms.map((term) => {
    const match = CONDITION.exec(term);
    if (!match) return (group) => group.prompt.toLowerCase().includes(term);
    const [, name, operator, number] = match;
    return (group) => {
      const apart = (measure(group, name) ?? NaN) - Number(number);
      return (
        (operator.includes("<") && apart < 0) ||
        (operator.includes(">") && apart > 0) ||
        (operator.includes("=") && apart === 0)
      );
    };
  });
  return (group) => tests.every((test) => test(group));
}

const WIDTH = 180;
const MOST_HEIGHT = 20;
const GAP = 2;

/** values: float32[responses, columns] with accepted responses first; top: of the step's scale. */
function miniature(values, { responses, columns, accepted }, top) {
  const canvas = element("canvas", "miniature", { "aria-hidden": "true", style: { width: `${WIDTH}px` } });
  const line = Math.min(2.25, MOST_HEIGHT / responses);
  const context = fitCanvas(canvas, WIDTH, responses * line + GAP);
  const colours = cssColours("bg2", ...rampOf(SIGNED));
  const cell = WIDTH / columns;
  for (const [at, value] of values.entries()) {
    if (Number.isNaN(value)) continue;
    const [response, column] = [Math.floor(at / columns), at % columns];
    const y = response * line + (response >= accepted ? GAP : 0);
    context.fillStyle = colours[levelName(SIGNED, levelOf(SIGNED, value, top)) || "bg2"];
    context.fillRect(column * cell, y, Math.max(1, cell) + 0.3, line);
  }
  return canvas;
}
