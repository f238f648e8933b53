// Below the selected token: what the policy writes from before it and from after it, by answer, and "resample from here".

import { button, element, filledBar, menuOf, setAttributes } from "../dom.js";
import { fixed, plural } from "../format.js";

const AMOUNTS = [8, 32, 128];

export class Continuations {
  /** on: {measured(): new values are there, resized(), fail(error)} */
  constructor(counterfactual, on) {
    this.counterfactual = counterfactual;
    this.on = on;
    this.where = [-1, -1];
    /** How the last job ended here, if there is something to say about it. */
    this.ending = "";
    this.sides = element("div", "sides");
    this.remark = element("p", "say");
    this.bar = element("progress");
    this.stop = button("", "Cancel", () => counterfactual.cancel().catch(on.fail));
    this.start = button("resample", "Resample from here", () => this.resample().catch(on.fail));
    const amounts = AMOUNTS.map(String);
    this.amount = menuOf(
      "Continuations on either side",
      amounts.map((each) => [each, each]),
    );
    this.amount.value = amounts[1];
    this.controls = element("span", "resample-controls", this.start, " k = ", this.amount, this.bar, this.stop);
    const title = element("h3", "", "What would have followed", this.controls);
    this.node = element("section", "following", title, this.remark, this.sides);
    this.showRunning(null);
  }

  async show(response, position) {
    if (this.where[0] !== response || this.where[1] !== position) this.ending = "";
    this.where = [response, position];
    const { counterfactual } = this;
    this.controls.hidden = !counterfactual.canResample;
    const found = await counterfactual.ofToken(response, position);
    if (this.where[0] !== response || this.where[1] !== position) return;
    this.sides.replaceChildren(sideOf("before this token", found.before), sideOf("after it", found.after));
    this.sides.hidden = found.before === null && found.after === null;
    this.remark.replaceChildren(...this.words(found, response, position));
    this.on.resized();
  }

  words({ before, after }, response, position) {
    if (this.ending) return [this.ending];
    const { counterfactual } = this;
    if (before && after)
      return [`${counterfactual.origin}. Shares are probabilities; what repeats a response counts exactly.`];
    if (counterfactual.canResample) return ["Not measured here yet."];
    if (!counterfactual.run) return ["Not in this report."];
    const live = `gradtrace view ${counterfactual.run} --resample`;
    const words = element("code", "", counterfactual.command(response, position));
    return ["Not measured here. Run ", words, ", or sample from this page with ", element("code", "", live), "."];
  }

  async resample() {
    const [response, position] = this.where;
    this.showRunning({ done: 0, total: 0 });
    try {
      const k = Number(this.amount.value);
      const end = await this.counterfactual.resample(response, position, k, (state) => this.showRunning(state));
      this.ending = { failed: end.error, cancelled: "Cancelled." }[end.state] ?? "";
      await this.on.measured();
    } finally {
      this.showRunning(null);
    }
  }

  showRunning(state) {
    this.start.disabled = state !== null;
    this.bar.hidden = this.stop.hidden = state === null;
    if (state?.total) setAttributes(this.bar, { max: state.total, value: state.done });
    else this.bar.removeAttribute("value");
  }
}

/** @param {import("./counterfactual.js").Side} side */
function sideOf(title, side) {
  if (!side) return element("div", "side-of", element("h4", "", title), element("p", "say", "not measured"));
  const value = element("b", "", `V ${fixed(side.value, 3)} ± ${fixed(side.stderr, 3)}`);
  return element("div", "side-of", element("h4", "", `From ${title}: `, value), ...side.answers.map(answerLine));
}

/** @param {import("./counterfactual.js").Answer} answer */
function answerLine({ answer, reward, share, texts, examples }) {
  const line = element(
    "summary",
    "",
    element("span", "share", filledBar(reward > 0 ? "p3" : "l3", Math.min(1, share))),
    element("span", "percent", `${fixed(100 * share, share < 0.1 ? 1 : 0)} %`),
    element("code", "", answer || "∅"),
    element("span", "dim", `reward ${fixed(reward, Number.isInteger(reward) ? 0 : 2)}, ${plural(texts, "text")}`),
  );
  const node = element("details", "answer", line);
  for (const { text, share: own, response } of examples) {
    const name = response === null ? "" : `r${response}, `;
    node.append(element("p", "text", element("span", "dim", `${name}${fixed(100 * own, 1)} % `), text));
  }
  return node;
}
