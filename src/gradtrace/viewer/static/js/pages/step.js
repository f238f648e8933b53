// The step page: the prompt groups of one step as a table to sort and filter.

import { CREDIT_NAMES } from "../channels.js";
import { creditControl, searchBox } from "../controls.js";
import { element, fact, filledBar, linkTo, passDots, svgDot, svgElement, svgLine, svgPath, tableOf } from "../dom.js";
import { fixed, MISSING, numberStyle, plural, sharedStart } from "../format.js";
import { groupFilter } from "../group_filter.js";
import { question, scoreSentence } from "../meaning.js";
import { miniature } from "../miniature.js";
import { Page, pageHead } from "../page.js";
import { overheadOf } from "../run_charts.js";
import { meanOf } from "../scales.js";
import { Sorting, wideRow } from "../sorting.js";

const SHOW = ["all", "mixed", "skipped"];
const LONG_PROMPT = 40;

const WHY_SKIPPED = {
  constant_reward: "skipped: all rewards equal",
  over_prompt_cap: "skipped: over max_prompts_per_step",
  non_finite: "skipped: gradient not finite",
  not_captured: "skipped: no token captured",
  not_asked: "not scored: others were asked for",
};

const COLUMNS = [
  { key: "group", title: "Group", up: true },
  { key: "prompt", title: "Prompt", up: true },
  { key: "accepted", title: "Pass rate" },
  { key: "map", title: "Influence by position", fixed: true },
  { key: "entropy", title: "Entropy, nats" },
  { key: "size", title: "Σ |influence|" },
  { key: "length", title: "Mean length", number: true },
];

export async function openStepPage(context) {
  const { source, run, step } = context;
  const path = `runs/${run.id}/steps/${step}`;
  const table = await source.json(path);
  const credit = context.url.choice("credit", table.credits, table.common_credit ?? "position");
  const pictures = await loadMiniatures(source, path, table, credit);
  return () => new StepPage(context, table, path, credit, pictures);
}

async function loadMiniatures(source, path, table, credit) {
  return table.credits.includes(credit) ? source.floats(`${path}/miniatures?credit=${credit}`) : null;
}

const HINTS = { "j k": "row", "↵": "open", "[ ]": "step", "/": "filter" };

class StepPage extends Page {
  constructor(context, table, path, credit, pictures) {
    super(context, `step ${table.step}`, HINTS);
    this.table = table;
    this.path = path;
    this.credit = credit;
    this.pictures = pictures;
    this.sorting = new Sorting(this.url, COLUMNS, table.has_influence ? "size" : "group", () => this.fill());
    this.show = this.url.choice("show", SHOW);
    this.query = this.url.get("q") ?? "";
    this.current = -1;
    this.prepare();
    this.node.append(
      this.makeHead(),
      element("p", "story", table.story),
      ...this.makeNotices(),
      this.makeControls(),
      this.makeTable(),
    );
    this.fill();
  }

  /** Where each group's picture begins, and what all prompts have in common. */
  prepare() {
    let start = 0;
    for (const group of this.table.groups) {
      const columns = Math.min(180, group.longest);
      group.picture = { start, columns };
      start += columns * group.responses;
      group.passed = group.constant ? (group.best_reward > 0 ? group.responses : 0) : group.accepted;
    }
    this.cut = sharedStart(this.table.groups.map((group) => group.prompt));
    this.isProse = this.table.groups.some((group) => group.prompt.length - this.cut > LONG_PROMPT);
  }

  makeHead() {
    const { groups, responses, step } = this.table;
    const scored = groups.filter((group) => group.status === "scored").length;
    const mixed = groups.filter((group) => !group.constant).length;
    const influence = this.table.has_influence
      ? `Influence, ${question(this.table.meta, this.credit)}, is computed in the ${scored} whose rewards differ${scored < mixed ? ` (${mixed - scored} of them skipped)` : ""}.`
      : "";
    const sub = `${plural(groups.length, "prompt group")}, ${plural(responses, "response")}. ${influence}`;
    const facts = element("div", "facts");
    facts.append(fact(fixed(meanOf(groups.map((group) => group.reward)), 2), "reward"));
    if (this.table.has_entropy)
      facts.append(fact(fixed(meanOf(groups.map((group) => group.entropy)), 3), "entropy, nats"));
    facts.append(fact(`${mixed} of ${groups.length}`, "mixed groups"));
    const row = this.run.rows.get(step);
    const overhead = row && overheadOf(row);
    if (overhead !== undefined) facts.append(fact(`+${fixed(100 * overhead, 1)} %`, "tracing overhead"));
    return pageHead(`Step ${step}`, sub, this.spark(), facts);
  }

  /** Where this step is in the run. */
  spark() {
    const points = this.run.series("critic/rewards/mean");
    if (points.length < 2) return null;
    const [width, height] = [220, 40];
    const [first, last] = [points[0].step, points.at(-1).step];
    const values = points.map((point) => point.value);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const x = (step) => 4 + ((step - first) / (last - first)) * (width - 8);
    const y = (value) => height - 5 - ((value - low) / (high - low || 1)) * (height - 12);
    const curve = svgPath(
      points.map((point) => [x(point.step), y(point.value)]),
      "line run-0",
    );
    const here = points.filter((point) => point.step === this.table.step);
    const marks = here.flatMap(({ step, value }) => [
      svgLine(x(step), 2, x(step), height, "crosshair"),
      svgDot(x(step), y(value), 3.5, "dot run-0"),
    ]);
    const drawing = svgElement("svg", { width, height, "aria-hidden": "true" }, curve, ...marks);
    return element("div", "spark wide-only", "reward", drawing);
  }

  makeNotices() {
    const { groups, has_influence: traced, problems } = this.table;
    const notices = problems.map((problem) => element("p", "notice problem", problem));
    const { vocabularyProblem, enabled } = this.run;
    if (vocabularyProblem) notices.push(element("p", "notice", vocabularyProblem));
    const say = (text) => notices.push(element("p", "strip notice", text));
    if (!traced && !problems.length) {
      say(
        enabled?.influence_trace === false
          ? "No influence: the influence trace was off in this run (trainer.influence_trace.enable=true turns it on)."
          : "No influence trace of this step: it is still being written, or the step is no multiple of its write_every.",
      );
    } else if (traced && this.table.meta.empty) {
      say(`No influence in this step: ${this.table.meta.empty}.`);
    } else if (traced && !groups.some((group) => group.status === "scored")) {
      const constant = groups.filter((group) => group.status === "constant_reward").length;
      say(
        constant === groups.length
          ? "No mixed group in this step: in every group all rewards are equal, so there is nothing to contrast and no influence."
          : "No group of this step was scored; the table says why for each.",
      );
    }
    return notices;
  }

  makeControls() {
    this.search = searchBox(
      "Filter:  *4-   pass<4   ent>0.2",
      "Filter groups by words of the prompt, or pass, ent, len, inf, reward compared with a number",
      this.query,
      (value) => {
        this.query = value;
        this.url.update({ q: value || null });
        this.fill();
      },
    );
    this.search.addEventListener("keydown", (event) => event.key === "Enter" && this.search.blur());
    this.count = element("span", "", { "aria-live": "polite" });
    const show = this.choiceOf("Show", "show", SHOW, () => this.fill());
    const credits = creditControl(this.credit, this.table.credits, (value) => this.setCredit(value));
    const tail = element("span", "tail", this.table.credits.length ? this.sizeKey() : null, this.count);
    return element("div", "controls strip step-controls", this.search, show, credits, tail);
  }

  sizeKey() {
    const title = scoreSentence(this.table.meta, this.credit);
    const name = element("span", "hint", { title }, "Σ |influence|:");
    const parts = [element("span", "swatch p3"), "positive part", element("span", "swatch n3"), "negative part"];
    return element("span", "", name, ...parts);
  }

  async setCredit(credit) {
    this.pictures = await loadMiniatures(this.context.source, this.path, this.table, credit);
    this.credit = credit;
    this.url.update({ credit });
    this.fill();
  }

  makeTable() {
    this.body = element("tbody");
    return tableOf(`fixed steps${this.isProse ? " prose" : ""}`, this.sorting.row, this.body);
  }

  influence(group) {
    return group[`influence_${this.credit}`] ?? null;
  }

  value(group, name) {
    const sums = this.influence(group);
    const size = sums ? sums.positive + sums.negative : NaN;
    const values = {
      group: group.group,
      prompt: group.prompt,
      accepted: group.passed / group.responses,
      entropy: group.entropy,
      size,
      length: group.length,
      pass: group.passed,
      ent: group.entropy,
      len: group.length,
      inf: size,
      reward: group.reward,
    };
    return values[name];
  }

  fill() {
    const matches = groupFilter(this.query, (group, name) => this.value(group, name));
    const isShown = {
      all: () => true,
      mixed: (group) => !group.constant,
      skipped: (group) => group.status !== "scored",
    }[this.show];
    this.shown = this.table.groups
      .filter((group) => isShown(group) && matches(group))
      .sort((a, b) => this.compare(a, b));
    this.count.textContent = `${this.shown.length} of ${plural(this.table.groups.length, "group")}`;
    const tops = {
      entropy: Math.max(1e-9, ...this.table.groups.map((group) => group.entropy ?? 0)),
      size: Math.max(1e-9, ...this.table.groups.map((group) => this.value(group, "size")).filter(Number.isFinite)),
    };
    this.body.replaceChildren(...this.shown.map((group, index) => this.row(group, index, tops)));
    if (!this.shown.length) {
      const why = this.query ? `No group matches “${this.query}”.` : `No ${this.show} group in this step.`;
      this.body.append(wideRow("dim", COLUMNS.length, why));
    }
  }

  /** Groups without a value come last, those with most accepted responses first among them. */
  compare(a, b) {
    const [x, y] = [this.value(a, this.sorting.key), this.value(b, this.sorting.key)];
    const both = (value) => value === undefined || value === null || Number.isNaN(value);
    const order = this.sorting.compare(x, y);
    return order || (both(x) && both(y) ? b.passed - a.passed : 0) || a.group - b.group;
  }

  row(group, index, tops) {
    const link = linkTo(this.context.href("group", { group: group.group }), "", String(group.group));
    const prompt = `${this.cut ? "…" : ""}${group.prompt.slice(this.cut)}`;
    const passed = element("span", "dim", `\u2002${group.passed}/${group.responses}`);
    const isThere = !this.context.groups || this.context.groups.includes(group.group);
    const onclick = () => this.context.go("group", { group: group.group });
    return element(
      "tr",
      `${isThere ? "opens" : "absent"}${group.status === "scored" || !this.table.has_influence ? "" : " skipped"}${index === this.current ? " current" : ""}`,
      isThere ? { onclick } : { title: "This group is not part of the report" },
      element("td", "c-group dim", isThere ? link : String(group.group)),
      element("td", "c-prompt prompt-cell", { title: group.prompt }, prompt),
      element("td", "c-accepted", passDots(group.passed, group.responses), passed),
      this.pictureCell(group),
      this.entropyCell(group, tops.entropy),
      this.sizeCell(group, tops.size),
      element("td", "c-length number", fixed(group.length, 1)),
    );
  }

  pictureCell(group) {
    const { start, columns } = group.picture;
    const isLeftOut = group.status === "constant_reward" && !group.constant; // its rewards differed before selection
    const why = isLeftOut
      ? "skipped: TracIn left no contrast"
      : (WHY_SKIPPED[group.status] ?? (this.table.has_influence ? "not traced" : ""));
    if (!this.pictures || group.status !== "scored") return element("td", "c-map reason", { title: why || null }, why);
    if (!this.influence(group))
      return element("td", "c-map reason", `${CREDIT_NAMES[group.credit] ?? "no"} credit only`);
    const values = this.pictures.subarray(start, start + columns * group.responses);
    const top = this.table.scales[`influence_${this.credit}`];
    return element("td", "c-map", miniature(values, group.responses, columns, group.accepted, top));
  }

  entropyCell(group, top) {
    if (group.entropy === undefined) return element("td", "c-entropy", MISSING);
    const bar = filledBar("", group.entropy / top);
    bar.style.background = `var(--${group.status === "scored" || !this.table.has_influence ? "e3" : "line2"})`;
    const number = element("b", "", fixed(group.entropy, 3));
    return element("td", "c-entropy", element("div", "with-bar", number, element("span", "", bar)));
  }

  sizeCell(group, top) {
    const sums = this.influence(group);
    if (!sums) return element("td", "c-size", MISSING);
    const parts = { p3: sums.positive, n3: sums.negative };
    const bars = Object.entries(parts).map(([name, value]) => filledBar(name, (0.99 * value) / top));
    const size = sums.positive + sums.negative;
    const number = element("b", "", numberStyle(top, 4).plain(size));
    const name = CREDIT_NAMES[group.credit];
    const title = `The best credit that this group has is ${name}: its page shows it.`;
    const best = this.table.credits.length > 1 ? element("small", "dim", { title }, name) : null;
    return element("td", "c-size", element("div", "with-bar", number, element("span", "", ...bars), best));
  }

  retheme() {
    this.fill();
  }

  move(direction) {
    this.current = Math.max(0, Math.min(this.shown.length - 1, this.current + direction));
    for (const [index, row] of [...this.body.children].entries())
      row.classList.toggle("current", index === this.current);
    this.body.children[this.current]?.scrollIntoView({ block: "nearest" });
    const { group, prompt } = this.shown[this.current] ?? {};
    this.context.announce(`group ${group}, ${prompt?.slice(this.cut, this.cut + 80)}`);
  }

  open() {
    const chosen = this.shown[this.current];
    if (!chosen) return false;
    return this.context.go("group", { group: chosen.group });
  }

  get actions() {
    return { j: () => this.move(1), k: () => this.move(-1), Enter: () => this.open() };
  }
}
