// The find page: a text, a token, the most harmful tokens of all steps, those on which sampler and trainer disagree,
// prompts whose pass rate fell, and one prompt over time. The server answers for a few steps at a time; the page shows how far it is and can be stopped.

import { CREDIT_NAMES } from "../channels.js";
import { searchBox, segmentedControl } from "../controls.js";
import { acceptedMark, button, element, linkTo, passDots, tableOf } from "../dom.js";
import { count, fixed, numberStyle, plural } from "../format.js";
import { Page, pageHead } from "../page.js";

const WHAT = {
  text: "a text",
  token: "a token",
  harm: "most harmful tokens",
  mismatch: "sampler against trainer",
  prompts: "prompts whose pass rate fell",
  prompt: "one prompt over time",
};
const SAYS = {
  text: "Prompts and responses that hold a text, in all traced steps; the first place in each.",
  token: "Every occurrence of a token: its text, or #id. Those with the largest score first in each step.",
  harm: "The lowest scores of all steps: where training’s step on a token is estimated to hurt the accepted answers against the rejected ones. Scores of different steps are taken at different weights, and of different credits in different units.",
  mismatch:
    "The tokens whose log-prob as the trainer finds it lies furthest from what the sampler reported, by 0.001 nats or more: trainer minus sampler. A token’s own term of the update is multiplied by the exponential of it where the loop corrects for the sampler.",
  prompts: "Prompts that were drawn more than once, by how much less often they passed the last time than the first.",
  prompt: "Every step in which this prompt was drawn.",
};
/** Why a search of the whole run may have found nothing, where that is not plain. */
const WHY_NONE = {
  harm: " Only scores below zero count, and only steps with an influence trace have scores.",
  mismatch:
    " Either they agree on every token, or the files hold no log-probs of the sampler’s own (docs: Sampler and trainer disagree).",
};
/** The page stops here and offers to go on; for prompts it keeps more, because it must put steps together. */
const MOST_HITS = { text: 200, token: 200, harm: 2000, mismatch: 2000, prompts: 50000, prompt: 2000 };
const MOST_ROWS = 200;

export async function openFindPage(context) {
  return () => new FindPage(context);
}

class FindPage extends Page {
  constructor(context) {
    super(context, "find", { "/": "find" }, "find-page");
    this.what = this.url.choice("what", Object.keys(WHAT));
    this.query = this.url.get("q") ?? "";
    this.status = element("div", "find-status", { "aria-live": "polite" });
    this.results = element("div");
    this.node.append(pageHead("Find", SAYS[this.what]), this.makeControls(), this.status, this.results);
    this.ticket = 0;
    this.begin();
  }

  makeControls() {
    const offered = Object.entries(WHAT).filter(([value]) => value !== "prompt" || this.what === "prompt");
    const kinds = segmentedControl({
      label: "Find",
      value: this.what,
      options: Object.fromEntries(offered),
      onChange: (what) => this.context.go("find", { what, q: this.query || null }),
    });
    const controls = element("div", "controls strip", kinds);
    if (["text", "token"].includes(this.what)) {
      const box = searchBox("Type, then Enter", `Find ${WHAT[this.what]} in the whole run`, this.query, (value) => {
        this.query = value;
      });
      box.addEventListener("keydown", (event) => event.key === "Enter" && this.begin());
      controls.append(box);
    }
    return controls;
  }

  begin() {
    const needs = ["text", "token"].includes(this.what);
    this.url.update({ q: this.query || null });
    this.hits = [];
    this.more = 0;
    this.limit = MOST_HITS[this.what];
    this.results.replaceChildren();
    this.status.replaceChildren();
    if (!needs || this.query) this.search(0).catch(this.context.fail);
  }

  get path() {
    const { run, step, group } = this.context;
    if (this.what === "prompt") return `runs/${run.id}/steps/${step}/groups/${group}/history?`;
    return `runs/${run.id}/find?what=${this.what}&q=${encodeURIComponent(this.query)}&`;
  }

  async search(first) {
    const ticket = ++this.ticket;
    let next = first;
    while (next !== null) {
      const answer = await this.context.source.json(`${this.path}from=${next}`);
      if (ticket !== this.ticket) return; // stopped, or another search began
      this.hits.push(...answer.hits);
      this.more += answer.more;
      next = answer.next;
      const isFull = this.hits.length >= this.limit && next !== null;
      this.showStatus(answer, next, isFull);
      this.show();
      if (isFull) return;
    }
  }

  showStatus({ searched, steps, unreadable }, next, isFull) {
    const found = this.what.startsWith("prompt") ? plural(this.hits.length, "group") : count(this.hits.length);
    const left = this.more ? ` (${count(this.more)} more in these steps are left out)` : "";
    const damaged = unreadable.length ? ` Steps that cannot be read: ${unreadable.join(", ")}.` : "";
    const words = `${searched} of ${plural(steps, "traced step")} searched, ${found} found${left}.${damaged}`;
    const why = next === null && !this.hits.length ? (WHY_NONE[this.what] ?? "") : "";
    this.status.replaceChildren(element("span", "", words + why));
    if (next === null) return;
    const goOn = () => {
      this.limit += MOST_HITS[this.what];
      this.search(next).catch(this.context.fail);
    };
    const stop = () => {
      this.ticket += 1;
      this.status.replaceChildren(element("span", "", `${words} Stopped.`), button("link-button", "go on", goOn));
    };
    this.status.append(isFull ? button("link-button", "go on", goOn) : button("link-button", "stop", stop));
  }

  show() {
    const sorted = (order) => [...this.hits].sort(order);
    const furthest = (a, b) => Math.abs(b.score) - Math.abs(a.score);
    const draw = {
      text: () => this.tokenTable(this.hits),
      token: () => this.tokenTable(this.hits),
      harm: () => this.tokenTable(sorted((a, b) => a.score - b.score)),
      mismatch: () => this.tokenTable(sorted(furthest), "Nats"),
      prompts: () => this.fallen(),
      prompt: () => this.history(),
    };
    this.results.replaceChildren(draw[this.what]());
  }

  place({ step, group, response, position }, text) {
    const sel = response === null || response === undefined ? null : `${response}.${position}`;
    return linkTo(this.context.href("group", { step, group, sel }), "link-button", text);
  }

  tokenTable(hits, scoreName = "Score") {
    const rows = hits.slice(0, MOST_ROWS).map((hit) => {
      const who = hit.response === null ? "prompt" : `r${hit.response}, token ${hit.position}`;
      const score = Number.isFinite(hit.score) ? numberStyle(Math.abs(hit.score), 3).signed(hit.score) : "";
      const match = element("mark", "", oneLine(hit.match));
      return element(
        "tr",
        "",
        element("td", "", `step ${hit.step}`),
        element("td", "", this.place(hit, `group ${hit.group}`)),
        element("td", "", hit.response === null ? null : acceptedMark(hit.accepted), ` ${who}`),
        element("td", "number", score ? `${score} ${CREDIT_NAMES[hit.credit] ?? ""}` : ""),
        element("td", "context", oneLine(hit.before), match, oneLine(hit.after)),
      );
    });
    const heads = { Step: "", Group: "", Where: "", [scoreName]: scoreName === "Score" ? "number" : "", Text: "" };
    return tableOf("fixed", heads, element("tbody", "", ...rows));
  }

  /** The first and the last group of every prompt that was drawn in several steps. */
  fallen() {
    const prompts = new Map();
    for (const hit of this.hits) {
      const known = prompts.get(hit.key);
      prompts.set(hit.key, { first: known?.first ?? hit, last: hit, times: (known?.times ?? 0) + 1 });
    }
    const again = [...prompts.values()].filter(({ first, last }) => first.step !== last.step);
    const fell = again.filter((each) => rate(each.last) < rate(each.first)).sort((a, b) => drop(b) - drop(a));
    const body = element("tbody");
    for (const { first, last, times } of fell.slice(0, MOST_ROWS)) {
      const steps = `${first.step} → ${last.step}`;
      const href = this.context.href("find", { what: "prompt", step: last.step, group: last.group });
      const link = linkTo(href, "link-button", `${times} times`);
      const rates = `${first.passed}/${first.responses} → ${last.passed}/${last.responses}`;
      const sure = isSure(first, last) ? "beyond chance" : "may be chance";
      const cells = [steps, link, rates, sure].map((cell) => element("td", "", cell));
      body.append(element("tr", "", ...cells, element("td", "context", oneLine(last.prompt))));
    }
    const words = again.length
      ? `${plural(again.length, "prompt")} drawn in several steps, ${fell.length} passed less often the last time.`
      : "No prompt was drawn in two of these steps, so none can be followed.";
    const heads = { Steps: "", Drawn: "", Passed: "", "": "", Prompt: "" };
    const found = fell.length ? tableOf("fixed", heads, body) : null;
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
