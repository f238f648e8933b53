// Counterfactual values of a group: V and ΔV of its tokens, what follows before and after one, and live resampling.

import { Frame, LinearScale } from "../charts.js";
import { button, element, filledBar, menuOf, setAttributes, svgBand, svgElement, svgLine, svgPath } from "../dom.js";
import { fixed, plural } from "../format.js";
import { orNull } from "../source.js";

const POLL = 300;
const CHANNELS = ["delta_v", "delta_v_stderr", "value", "value_stderr"];

/**
 * @typedef {{answer: string, reward: number, share: number, texts: number,
 *   examples: {text: string, share: number, response: number | null}[]}} Answer
 * @typedef {{value: number, stderr: number, answers: Answer[]} | null} Side
 */

export class Counterfactual {
  constructor(source, path, group) {
    this.source = source;
    this.path = path;
    this.group = group;
    this.measured = null;
    this.canResample = false;
    this.run = "";
  }

  /** Read what is stored. A report may have nothing. */
  async load() {
    const answer = await orNull(this.source.json(`${this.path}/counterfactual`));
    if (answer === null) return this;
    this.run = answer.run;
    this.canResample = answer.resample;
    this.measured = this.group.measured = answer.measured;
    for (const name of this.measured ? CHANNELS : [])
      this.group.channels.set(
        name,
        Float32Array.from(this.measured[name], (value) => value ?? NaN),
      );
    return this;
  }

  /** Where the samples came from, in words. */
  get origin() {
    const { about, samples } = this.measured;
    const away = about.steps_away;
    const distance = away
      ? `, ${Math.abs(away)} steps ${away > 0 ? "after" : "before"} the weights that wrote this`
      : "";
    return `${samples.toLocaleString("en-US")} continuations from ${about.checkpoint}${distance}`;
  }

  /** What to type where no model is at hand. */
  command(response, position) {
    const { step, group } = this.group.structure;
    return `gradtrace counterfactual ${this.run} --step ${step} --group ${group} --response ${response} --tokens ${position}`;
  }

  /** @returns {Promise<{before: Side, after: Side}>} What the policy writes from before a token, and from after it. */
  async ofToken(response, position) {
    const path = `${this.path}/counterfactual/${response}/${position}`;
    return (this.measured && (await orNull(this.source.json(path)))) ?? { before: null, after: null };
  }

  /** Sample k continuations from before and after a token. `onState` hears how far it is; resolves to its last state. */
  async resample(response, position, k, onState) {
    let state = await this.source.post(`${this.path}/resample/${response}/${position}?k=${k}`);
    while (state.state === "running") {
      onState(state);
      await new Promise((resolve) => setTimeout(resolve, POLL));
      state = await this.source.json("resample");
    }
    await this.load();
    return state;
  }

  cancel() {
    return this.source.post("resample/cancel");
  }
}

const AMOUNTS = ["8", "32", "128"].map((each) => [each, each]);

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
    this.amount = menuOf("Continuations on either side", AMOUNTS);
    this.amount.value = "32";
    this.controls = element("span", "resample-controls", this.start, " k = ", this.amount, this.bar, this.stop);
    const title = element("h3", "", "What would have followed", this.controls);
    this.node = element("section", "following", title, this.remark, this.sides);
    this.showRunning(null);
  }

  async show(response, position) {
    const isHere = () => this.where[0] === response && this.where[1] === position;
    if (!isHere()) this.ending = "";
    this.where = [response, position];
    const { counterfactual } = this;
    this.controls.hidden = !counterfactual.canResample;
    const found = await counterfactual.ofToken(response, position);
    if (!isHere()) return;
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

/** @param {Side} side */
function sideOf(title, side) {
  if (!side) return element("div", "side-of", element("h4", "", title), element("p", "say", "not measured"));
  const value = element("b", "", `V ${fixed(side.value, 3)} ± ${fixed(side.stderr, 3)}`);
  return element("div", "side-of", element("h4", "", `From ${title}: `, value), ...side.answers.map(answerLine));
}

/** @param {Answer} answer */
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

const WIDTH = 200;
const HEIGHT = 26;
const INSET = 2;

/** An SVG, or null where nothing was measured. `onPick(position)`: a token was pointed at and clicked. */
export function valueCurve(group, response, onPick) {
  const values = group.values("value")?.subarray(response.start, response.end);
  if (!values?.some(Number.isFinite)) return null;
  const errors = group.values("value_stderr").subarray(response.start, response.end);
  const { prompt_value: start, prompt_value_stderr: startError, bounds } = group.measured;
  const [low, high] = bounds;
  const frame = new Frame(WIDTH, HEIGHT, { left: INSET, right: INSET, top: INSET, bottom: INSET });
  const [places, rewards] = [new LinearScale(0, values.length), new LinearScale(low, high)];
  const at = (place, value) => [frame.x(places.at(place)), frame.y(rewards.at(clamp(value, low, high)))];
  const after = Array.from(values, (value, place) => ({ place: place + 1, value, error: errors[place] }));
  const known = [{ place: 0, value: start, error: startError }, ...after].filter(({ value }) => Number.isFinite(value));
  const line = (errors) => known.map(({ place, value, error }) => at(place, value + errors * error));
  const words = `V from ${fixed(known[0].value, 2)} to ${fixed(known.at(-1).value, 2)} along ${response.name}`;
  const onclick = (event) => {
    const box = curve.getBoundingClientRect();
    const place = Math.ceil(((event.clientX - box.left) / box.width) * values.length) - 1;
    onPick(clamp(place, 0, values.length - 1));
  };
  const curve = svgElement(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "value-curve", role: "img", "aria-label": words, onclick },
    { "data-response": response.index },
    svgElement("title", {}, words),
    svgLine(0, frame.bottom, WIDTH, frame.bottom, "base"),
    svgBand(line(2), line(-2), "band"),
    svgPath(line(0), "line"),
  );
  return curve;
}

function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}
