// Counterfactual values of a group: V and ΔV of its tokens, what follows before and after one, and live resampling.

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

  /** Read what is stored. A report, or an older server, has nothing. */
  async load() {
    const answer = await orNull(this.source.json(`${this.path}/counterfactual`));
    if (answer === null) return this;
    this.run = answer.run;
    this.canResample = answer.resample;
    this.measured = answer.measured;
    for (const name of this.measured ? CHANNELS : []) {
      const values = Float32Array.from(this.measured[name], (value) => value ?? NaN);
      this.group.channels.set(name, values);
    }
    this.group.promptValue = this.measured?.prompt_value ?? NaN;
    this.group.promptValueError = this.measured?.prompt_value_stderr ?? NaN;
    this.group.rewardBounds = this.measured?.bounds ?? [0, 1];
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
