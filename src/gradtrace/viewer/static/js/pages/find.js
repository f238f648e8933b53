// The find page: a text, a token, the most harmful tokens of all steps, those on which sampler and trainer disagree,
// prompts whose pass rate fell, and one prompt over time. The server answers for a few steps at a time; the page shows
// how far it is and can be stopped.

import { SCORE_NAMES } from "../channels.js";
import { searchBox, segmentedControl } from "../controls.js";
import { acceptedMark, button, element, linkTo, passDots, rowOf, tableOf } from "../dom.js";
import { count, fixed, plural, scoreStyle, withUnit } from "../format.js";
import { Page, pageHead } from "./page.js";

const MOST_ROWS = 200;

/**
 * What can be looked for. `most`: the page stops at so many hits and offers to go on; for prompts it keeps more, because
 * it must put steps together. `none`: why a search of the whole run may have found nothing, where that is not plain.
 * @type {Record<string, {title: string, says: string, most: number, draw: (page: FindPage) => Node, typed?: boolean,
 *   none?: string}>}
 */
const SEARCHES = {
  text: {
    title: "a text",
    says: "Prompts and responses that hold a text, in all traced steps; the first place in each.",
    most: 200,
    typed: true,
    draw: (page) => page.tokenTable(page.hits),
  },
  token: {
    title: "a token",
    says: "Every occurrence of a token: its text, or #id. Those with the largest score first in each step.",
    most: 200,
    typed: true,
    draw: (page) => page.tokenTable(page.hits),
  },
  harm: {
    title: "most harmful tokens",
    says: "The lowest scores of all steps: where training on a token lowered the objective most. Scores of different steps are taken at different weights; those of captured factors have another unit.",
    most: 2000,
    draw: (page) => page.tokenTable(page.hits.toSorted((a, b) => a.score - b.score)),
    none: " Only scores below zero count, and only steps with an influence trace have scores.",
  },
  mismatch: {
    title: "sampler against trainer",
    says: "The tokens whose log-prob as the trainer finds it lies furthest from what the sampler reported, by 0.001 nats or more: trainer minus sampler. A token’s own term of the update is multiplied by the exponential of it where the loop corrects for the sampler.",
    most: 2000,
    draw: (page) =>
      page.tokenTable(
        page.hits.toSorted((a, b) => Math.abs(b.score) - Math.abs(a.score)),
        "Nats",
      ),
    none: " Either they agree on every token, or the files hold no log-probs of the sampler’s own (docs: Sampler and trainer disagree).",
  },
  prompts: {
    title: "prompts whose pass rate fell",
    says: "Prompts that were drawn more than once, by how much less often they passed the last time than the first.",
    most: 50000,
    draw: (page) => page.fallen(),
  },
  prompt: {
    title: "one prompt over time",
    says: "Every step in which this prompt was drawn.",
    most: 2000,
    draw: (page) => page.history(),
  },
};

export async function openFindPage(context) {
  return () => new FindPage(context);
}

class FindPage extends Page {
  constructor(context) {
    super(context, "find", { "/": "find" }, "find-page");
    this.what = this.url.choice("what", Object.keys(SEARCHES));
    this.search = SEARCHES[this.what];
    this.query = this.url.get("q") ?? "";
    this.status = element("div", "find-status", { "aria-live": "polite" });
    this.results = element("div");
    this.node.append(pageHead("Find", this.search.says), this.makeControls(), this.status, this.results);
    this.ticket = 0;
    this.begin();
  }

  makeControls() {
    const offered = Object.entries(SEARCHES).filter(([what]) => what !== "prompt" || this.what === "prompt");
    const kinds = segmentedControl({
      label: "Find",
      value: this.what,
      options: Object.fromEntries(offered.map(([what, { title }]) => [what, title])),
      onChange: (what) => this.context.go("find", { what, q: this.query }),
    });
    const note = (value) => {
      this.query = value;
    };
    const words = `Find ${this.search.title} in the whole run`;
    const box = searchBox("Type, then Enter", words, this.query, note, () => this.begin());
    return element("div", "controls strip", kinds, this.search.typed ? box : null);
  }

  begin() {
    this.url.update({ q: this.query });
    this.hits = [];
    this.more = 0;
    this.limit = this.search.most;
    this.results.replaceChildren();
    this.status.replaceChildren();
    if (!this.search.typed || this.query) this.look(0).catch(this.context.fail);
  }

  get path() {
    const { run, step, group } = this.context;
    if (this.what === "prompt") return `runs/${run.id}/steps/${step}/groups/${group}/history?`;
    return `runs/${run.id}/find?what=${this.what}&q=${encodeURIComponent(this.query)}&`;
  }

  async look(first) {
    const ticket = ++this.ticket;
    let next = first;
    do {
      const answer = await this.context.source.json(`${this.path}from=${next}`);
      if (ticket !== this.ticket) return; // stopped, or another search began
      this.hits.push(...answer.hits);
      this.more += answer.more;
      next = answer.next;
      this.showStatus(answer);
      this.results.replaceChildren(this.search.draw(this));
    } while (next !== null && this.hits.length < this.limit);
  }

  showStatus({ searched, steps, unreadable, next }) {
    const found = this.what.startsWith("prompt") ? plural(this.hits.length, "group") : count(this.hits.length);
    const left = this.more ? ` (${count(this.more)} more in these steps are left out)` : "";
    const damaged = unreadable.length ? ` Steps that cannot be read: ${unreadable.join(", ")}.` : "";
    const words = `${searched} of ${plural(steps, "traced step")} searched, ${found} found${left}.${damaged}`;
    const why = next === null && !this.hits.length ? (this.search.none ?? "") : "";
    this.status.replaceChildren(element("span", "", words + why));
    if (next === null) return;
    const goOn = button("link-button", "go on", () => {
      this.limit += this.search.most;
      this.look(next).catch(this.context.fail);
    });
    const stop = button("link-button", "stop", () => {
      this.ticket += 1;
      this.status.replaceChildren(element("span", "", `${words} Stopped.`), goOn);
    });
    this.status.append(this.hits.length >= this.limit ? goOn : stop);
  }

  place({ step, group, response, position }, text) {
    const sel = response === null || response === undefined ? null : `${response}.${position}`;
    return linkTo(this.context.href("group", { step, group, sel }), "link-button", text);
  }

  tokenTable(hits, scoreName = "Score") {
    const rows = hits.slice(0, MOST_ROWS).map((hit) => {
      const who = hit.response === null ? "prompt" : `r${hit.response}, token ${hit.position}`;
      const style = scoreStyle(hit.by === "influence" ? "nats" : "", Math.abs(hit.score));
      const by = hit.by && hit.by !== "influence" ? ` ${SCORE_NAMES[hit.by]}` : "";
      const score = Number.isFinite(hit.score) ? withUnit(style.signed(hit.score), style) + by : "";
      const match = element("mark", "", oneLine(hit.match));
      return rowOf(
        "",
        null,
        `step ${hit.step}`,
        this.place(hit, `group ${hit.group}`),
        ["", hit.response === null ? null : acceptedMark(hit.accepted), ` ${who}`],
        ["number", score],
        ["context", oneLine(hit.before), match, oneLine(hit.after)],
      );
    });
    const heads = { Step: "", Group: "", Where: "", [scoreName]: scoreName === "Score" ? "number" : "", Text: "" };
    return tableOf("fixed", heads, element("tbody", "", ...rows));
  }

  /** The first and the last group of every prompt that was drawn in several steps. */
  fallen() {
    const prompts = Map.groupBy(this.hits, (hit) => hit.key).values();
    const pairs = Array.from(prompts, (drawn) => ({ first: drawn[0], last: drawn.at(-1), times: drawn.length }));
    const again = pairs.filter(({ first, last }) => first.step !== last.step);
    const fell = again.filter((each) => drop(each) > 0).sort((a, b) => drop(b) - drop(a));
    const rows = fell.slice(0, MOST_ROWS).map(({ first, last, times }) => {
      const href = this.context.href("find", { what: "prompt", step: last.step, group: last.group });
      return rowOf(
        "",
        null,
        `${first.step} → ${last.step}`,
        linkTo(href, "link-button", `${times} times`),
        `${first.passed}/${first.responses} → ${last.passed}/${last.responses}`,
        isSure(first, last) ? "beyond chance" : "may be chance",
        ["context", oneLine(last.prompt)],
      );
    });
    const words = again.length
      ? `${plural(again.length, "prompt")} drawn in several steps, ${fell.length} passed less often the last time.`
      : "No prompt was drawn in two of these steps, so none can be followed.";
    const heads = { Steps: "", Drawn: "", Passed: "", "": "", Prompt: "" };
    const found = fell.length ? tableOf("fixed", heads, element("tbody", "", ...rows)) : null;
    return element("div", "", element("p", "dim", words), found);
  }

  history() {
    const steps = this.hits.map((hit) => {
      const answers = hit.answers.map(({ text, times, accepted }) =>
        element("li", "", acceptedMark(accepted), element("span", "", text), `×${times}`),
      );
      return element(
        "section",
        "",
        element("h2", "", this.place(hit, `Step ${hit.step}`)),
        element("p", "", passDots(hit.passed, hit.responses), ` ${hit.passed}/${hit.responses}`),
        element("p", "dim", `mean length ${fixed(hit.length, 1)}, reward ${fixed(hit.reward, 2)}`),
        element("ul", "", ...answers),
        hit.others ? element("p", "dim", plural(hit.others, "other answer")) : null,
      );
    });
    return element("div", "history", ...steps);
  }

  destroy() {
    super.destroy();
    this.ticket += 1;
  }
}

const rate = ({ passed, responses }) => passed / responses;
const drop = ({ first, last }) => rate(first) - rate(last);

/** Two standard errors of the difference of two shares, taken at their common rate. */
function isSure(first, last) {
  const common = (first.passed + last.passed) / (first.responses + last.responses);
  const error = Math.sqrt(common * (1 - common) * (1 / first.responses + 1 / last.responses));
  return rate(first) - rate(last) > 2 * error;
}

function oneLine(text) {
  return text.replaceAll("\n", "↵");
}
