// The entropy page: what the update was predicted to do to entropy, what it did, and which tokens did it.

import { SIGNED } from "../colours.js";
import { nextOf } from "../controls.js";
import { acceptedMark, button, divergingBar, element, factList, markCurrent, rowOf, whenNear } from "../dom.js";
import { MISSING, count, fixed, numberStyle, plural, signed } from "../format.js";
import { rampParts } from "../group/legend.js";
import { IdentityPlot } from "../plots.js";
import { ENTROPY_CHANGE_CHART, entropyChanges } from "../run_charts.js";
import { ResponseTexts, cutPrompts, readTokens } from "../scores/responses.js";
import { largestSize } from "../statistics.js";
import { Page, neighbourIn, opensInstrument, pageHead } from "./page.js";

/**
 * The two batches: the token columns that are shown of their responses, the name of their scale, what a response counts
 * for, and words.
 */
const BATCHES = {
  update: {
    title: "that make the update",
    maps: ["token_share"],
    scale: "token_share",
    strength: (row) => row.share,
    missing: "shares of single tokens",
    meaning: "Blue, bar above: training on this token raises entropy. Orange, bar below: lowers it.",
  },
  evaluation: {
    title: "that measure entropy",
    maps: ["entropy_change", "entropy_change_measured"],
    scale: "change",
    strength: (row) => (row.entropy_change ?? row.entropy_change_measured ?? 0) * row.length,
    missing: "changes at single tokens",
    meaning: "Blue, bar above: the policy becomes less sure here. Orange, bar below: surer. One scale for both.",
  },
};
const BATCH_TITLES = Object.fromEntries(Object.entries(BATCHES).map(([name, { title }]) => [name, title]));
const ORDERS_OF_RESPONSES = { strongest: "strongest first", sampled: "as sampled" };
const AT_FIRST = 16;
const ESTIMATES = {
  predicted: "predicted ΔH, nats",
  measured: "measured ΔH, nats",
  fresh: "on fresh samples",
  covariance: "−η·Cov(log π, A)",
};
const MAP_TITLES = {
  token_share: "Share of each token in the predicted change",
  entropy_change: "Predicted change of entropy at each token",
  entropy_change_measured: "Measured change",
};

const HINTS = { b: "batch", o: "order", "j k": "response", "[ ]": "step" };

class ProbePage extends Page {
  constructor(context, path, structure) {
    super(context, `entropy probe, step ${structure.step}`, HINTS, "probe-page");
    this.structure = structure;
    this.meta = structure.meta;
    this.texts = new ResponseTexts(context.source, path);
    cutPrompts(structure.groups);
    this.batch = this.url.choice("batch", Object.keys(BATCHES));
    this.order = this.url.choice("order", Object.keys(ORDERS_OF_RESPONSES));
    this.selected = this.url.number("sel");
    this.most = Math.max(AT_FIRST, this.url.number("n") ?? 0);
    this.build();
    readTokens(this.node);
  }

  /* ---------- building ---------- */

  build() {
    const { step, update, evaluation } = this.structure;
    const sub = `What the update of this step does to entropy. Update batch: ${plural(update.length, "response")}. Evaluation batch: ${plural(evaluation.length, "response")}, ${count(evaluation.reduce((sum, row) => sum + row.length, 0))} tokens.`;
    this.charts = this.stepCharts("entropy_probe", step, [ENTROPY_CHANGE_CHART]);
    this.charts.node.classList.add("single");
    this.plot = this.makePlot();
    this.legend = element("div", "probe-legend");
    this.list = element("div", "probe-list");
    const identity = element("section", "identity", element("h2", "", this.plot.heading), this.plot.node);
    this.node.append(
      pageHead(`Entropy probe, step ${step}`, sub, this.facts()),
      element("div", "probe-columns strip", this.charts.node, identity, this.partsSection()),
      this.controls(),
      this.legend,
      this.list,
    );
  }

  facts() {
    const { meta } = this;
    const estimates = Object.entries(ESTIMATES).map(([name, label]) => {
      const value = meta[`delta_h_${name}`];
      const error = meta[`delta_h_${name}_stderr`];
      if (!Number.isFinite(value)) return null;
      const style = numberStyle(Math.max(Math.abs(value), error ?? 0), 2);
      return [style.signed(value) + (Number.isFinite(error) ? ` ± ${style.plain(error)}` : ""), label];
    });
    const sample = `${fixed(meta.ess, 1)} of ${this.structure.evaluation.length}`;
    return factList(...estimates, Number.isFinite(meta.ess) ? [sample, "effective sample size"] : null);
  }

  /** The sweep over step sizes if there is one, else all steps of the run. */
  makePlot() {
    const sweep = Array.isArray(this.meta.eta_sweep) ? this.meta.eta_sweep : [];
    const hasFresh = sweep.some(({ fresh }) => Number.isFinite(fresh));
    return new IdentityPlot(sweep.length ? sweep.flatMap(sweepPoints) : this.stepPoints(), {
      heading: sweep.length ? "Predicted and measured over step sizes η" : "Predicted and measured, all steps",
      label: "Measured against predicted entropy change; dashed: they agree",
      note: hasFresh ? "filled: same responses, ring: fresh samples" : "",
    });
  }

  stepPoints() {
    return entropyChanges(this.run).map(({ step, predicted, measured }) => ({
      predicted,
      measured,
      label: step === this.structure.step ? `step ${step}` : "",
      words: `step ${step}: predicted ${signed(predicted, 6)}, measured ${signed(measured, 6)} nats`,
    }));
  }

  /** Parts that sum to the predicted change. */
  partsSection() {
    const { parts } = this.structure;
    const total = this.meta.delta_h_predicted ?? parts.reduce((sum, part) => sum + part.value, 0);
    const top = largestSize([total, ...parts.map((part) => part.value)], 1e-300);
    const style = numberStyle(top);
    const row = (className, value, ...words) =>
      rowOf(className, null, ["", ...words], ["number", style.signed(value)], divergingBar(value, top));
    const rows = parts.map(({ name, value, count: members }) =>
      row("", value, name, members === null ? null : element("span", "dim", ` ${members}`)),
    );
    const body = element("tbody", "", ...rows, row("total", total, "= predicted change"));
    return element(
      "section",
      "parts",
      element("h2", "", "Where it comes from"),
      element("table", "", body),
      element("p", "dim", "Nats per token of the evaluation batch. Positive: raises entropy."),
    );
  }

  controls() {
    const draw = () => {
      this.selected = null;
      this.url.update({ sel: null });
      this.drawList();
    };
    this.batches = this.choiceOf("Responses", "batch", BATCH_TITLES, draw);
    this.orders = this.choiceOf("Order", "order", ORDERS_OF_RESPONSES, draw);
    return element("div", "controls probe-controls", this.batches, this.orders);
  }

  /* ---------- responses as heat maps ---------- */

  get channels() {
    return BATCHES[this.batch].maps.filter((name) => this.structure.channels.includes(name));
  }

  get top() {
    return this.structure.scales[BATCHES[this.batch].scale];
  }

  get rows() {
    const strength = (row) => Math.abs(BATCHES[this.batch].strength(row));
    const rows = this.structure[this.batch];
    return this.order === "strongest" ? rows.toSorted((a, b) => strength(b) - strength(a)) : rows;
  }

  drawList() {
    this.observer?.disconnect();
    const { rows } = this;
    const shown = rows.filter((row, index) => index < this.most || row.response === this.selected);
    const shares = rows.map((row) => row.share);
    this.nodes = shown.map((row) => this.rowNode(row, largestSize(shares, 1e-300)));
    this.list.replaceChildren(...this.nodes);
    const more = Math.min(AT_FIRST, rows.length - shown.length);
    if (more > 0)
      this.list.append(button("link-button more", `show ${more} more of ${rows.length}`, () => this.showMore()));
    this.observer = whenNear(this.nodes, "600px", (node) => this.fill(node));
    this.drawLegend();
    this.mark();
  }

  showMore() {
    this.most += AT_FIRST;
    this.url.update({ n: this.most });
    this.drawList();
  }

  drawLegend() {
    const { channels } = this;
    const { missing, meaning } = BATCHES[this.batch];
    this.legend.dataset.maps = channels.length;
    if (!channels.length) return this.legend.replaceChildren(element("p", "notice", `This step stores no ${missing}.`));
    const top = this.top ?? 0;
    const style = numberStyle(top, 2);
    const ramp = element("div", "ramp", ...rampParts(SIGNED, style.signed(-top), "0", `${style.signed(top)} nats`));
    return this.legend.replaceChildren(
      element("div", "legend-words", element("p", "dim", meaning), ramp),
      ...channels.map((name) => element("h3", "", MAP_TITLES[name])),
    );
  }

  rowNode(row, topShare) {
    const isUpdate = this.batch === "update";
    const mark = row.accepted === null || !isUpdate ? null : acceptedMark(row.accepted);
    const change = (value) => (value === null ? MISSING : numberStyle(Math.abs(value)).signed(value));
    const onclick = () => this.select(row.response === this.selected ? null : row.response);
    const meta = element("div", "probe-meta", { onclick }, element("b", "", mark, ` response ${row.response}`));
    const line = (name, text) => meta.append(element("span", "key", name), element("span", "number", text));
    if (row.reward !== null) line("reward", fixed(row.reward, 2));
    if (isUpdate) {
      if (row.advantage !== null) line("advantage", signed(row.advantage, 2));
      line("share", numberStyle(topShare).signed(row.share));
      meta.append(divergingBar(row.share, topShare));
    } else {
      line("predicted", change(row.entropy_change));
      line("measured", change(row.entropy_change_measured));
      line("entropy", fixed(row.entropy, 3));
    }
    const maps = this.channels.map(() => element("div", "map", element("p", "dim", row.text)));
    const prompt = element("div", "prompt-line mono", this.structure.groups[row.group].text);
    const data = { "data-response": row.response, "data-maps": this.channels.length };
    return Object.assign(element("section", "probe-row", data, meta, prompt, ...maps), { probeRow: row, maps });
  }

  async fill(node) {
    const { channels, top } = this;
    try {
      const whole = await this.texts.get(
        node.probeRow.response,
        BATCHES[nextOf(Object.keys(BATCHES), this.batch)].maps,
      );
      for (const [index, map] of node.maps.entries()) map.replaceChildren(whole.map(channels[index], top));
    } catch (error) {
      for (const map of node.maps) map.append(element("p", "dim", error.message));
    }
  }

  select(response) {
    this.selected = response;
    this.url.update({ sel: response });
    this.mark();
  }

  /** The node of the selected response, where it is drawn. */
  get current() {
    return this.nodes.find((node) => node.probeRow.response === this.selected);
  }

  mark() {
    markCurrent(this.nodes, this.current);
  }

  /* ---------- living ---------- */

  mounted() {
    this.drawToWidth(this.charts.node, () => this.charts.draw());
    this.drawToWidth(this.plot.node, () => this.plot.draw());
    this.drawList();
  }

  update() {
    this.charts.draw();
  }

  move(direction) {
    const next = neighbourIn(this.nodes, this.current, direction);
    if (next) this.select(next.probeRow.response);
  }

  get actions() {
    return {
      b: () => this.batches.choose(nextOf(Object.keys(BATCHES), this.batch)),
      o: () => this.orders.choose(nextOf(Object.keys(ORDERS_OF_RESPONSES), this.order)),
      j: () => this.move(1),
      k: () => this.move(-1),
      Escape: () => this.select(null),
    };
  }

  destroy() {
    super.destroy();
    this.observer?.disconnect();
  }
}

/** A step size of the sweep: measured on the same responses, and on fresh ones where that was done. */
function sweepPoints({ eta, predicted, measured, measured_stderr: error, fresh, fresh_stderr: freshError }) {
  const size = Math.max(Math.abs(predicted), Math.abs(measured));
  const number = (value) => numberStyle(size).signed(value);
  const words = `step size × ${eta}: predicted ${number(predicted)}`;
  const same = { predicted, measured, error, label: `×${eta}`, words: `${words}, measured ${number(measured)} nats` };
  if (!Number.isFinite(fresh)) return [same];
  const other = { predicted, measured: fresh, error: freshError, ring: true };
  return [{ ...other, words: `${words}, on fresh samples ${number(fresh)} nats` }, same];
}

export const openProbePage = opensInstrument(ProbePage);
