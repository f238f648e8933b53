// The entropy page: what the update was predicted to do to entropy, what it did, and which tokens did it.

import { nextOf } from "../controls.js";
import { acceptedMark, button, divergingBar, element, fact, whenNear } from "../dom.js";
import { count, fixed, MISSING, numberStyle, plural, sharedStart, signed } from "../format.js";
import { rampParts } from "../group/legend.js";
import { neighbourIn, opensInstrument, Page, pageHead } from "../page.js";
import { ENTROPY_CHANGE_CHART, entropyChanges } from "../run_charts.js";
import { IdentityPlot } from "../scores/identity_plot.js";
import { readTokens, ResponseTexts } from "../scores/response_text.js";

const BATCHES = { update: "that make the update", evaluation: "that measure entropy" };
const ORDERS_OF_RESPONSES = { strongest: "strongest first", sampled: "as sampled" };
const AT_FIRST = 16;
const MAPS = { update: ["token_share"], evaluation: ["entropy_change", "entropy_change_measured"] };
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
    const cut = sharedStart(structure.groups.map((group) => group.text));
    for (const group of structure.groups) group.text = group.text.slice(cut);
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
    this.node.append(pageHead(`Entropy probe, step ${step}`, sub, this.facts()));
    this.charts = this.stepCharts("entropy_probe", step, [ENTROPY_CHANGE_CHART]);
    this.charts.node.classList.add("single");
    this.plot = this.makePlot();
    this.legend = element("div", "probe-legend");
    this.list = element("div", "probe-list");
    const identity = element("section", "identity", element("h2", "", this.plot.heading), this.plot.node);
    const columns = element("div", "probe-columns strip", this.charts.node, identity, this.partsSection());
    this.node.append(columns, this.controls(), this.legend, this.list);
  }

  facts() {
    const { meta } = this;
    const estimates = Object.entries(ESTIMATES).map(([name, label]) => {
      const value = meta[`delta_h_${name}`];
      const error = meta[`delta_h_${name}_stderr`];
      if (!Number.isFinite(value)) return null;
      const style = numberStyle(Math.max(Math.abs(value), error ?? 0), 2);
      return fact(style.signed(value) + (Number.isFinite(error) ? ` ± ${style.plain(error)}` : ""), label);
    });
    const sample = `${fixed(meta.ess, 1)} of ${this.structure.evaluation.length}`;
    const effective = Number.isFinite(meta.ess) ? fact(sample, "effective sample size") : null;
    return element("div", "facts", ...estimates, effective);
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
    const top = Math.max(...parts.map((part) => Math.abs(part.value)), Math.abs(total), 1e-300);
    const style = numberStyle(top);
    const row = (className, value, ...words) => {
      const number = element("td", "number", style.signed(value));
      return element("tr", className, element("td", "", ...words), number, element("td", "", divergingBar(value, top)));
    };
    const body = element("tbody");
    for (const { name, value, count: members } of parts)
      body.append(row("", value, name, members === null ? null : element("span", "dim", ` ${members}`)));
    body.append(row("total", total, "= predicted change"));
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
    this.batches = this.choiceOf("Responses", "batch", BATCHES, draw);
    this.orders = this.choiceOf("Order", "order", ORDERS_OF_RESPONSES, draw);
    return element("div", "controls probe-controls", this.batches, this.orders);
  }

  /* ---------- responses as heat maps ---------- */

  get channels() {
    return MAPS[this.batch].filter((name) => this.structure.channels.includes(name));
  }

  get top() {
    return this.structure.scales[this.batch === "update" ? "token_share" : "change"];
  }

  get rows() {
    const rows = [...this.structure[this.batch]];
    const strength = (row) =>
      Math.abs(
        this.batch === "update" ? row.share : (row.entropy_change ?? row.entropy_change_measured ?? 0) * row.length,
      );
    return this.order === "strongest" ? rows.sort((a, b) => strength(b) - strength(a)) : rows;
  }

  drawList() {
    this.observer?.disconnect();
    const { rows } = this;
    const shown = rows.slice(0, this.most);
    const picked = rows.find((row) => row.response === this.selected);
    if (picked && !shown.includes(picked)) shown.push(picked);
    const topShare = Math.max(...rows.map((row) => Math.abs(row.share)), 1e-300);
    this.nodes = shown.map((row) => this.rowNode(row, topShare));
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
    const { channels, top } = this;
    this.legend.dataset.maps = channels.length;
    if (!channels.length) {
      const what = this.batch === "update" ? "shares of single tokens" : "changes at single tokens";
      this.legend.replaceChildren(element("p", "notice", `This step stores no ${what}.`));
      return;
    }
    const style = numberStyle(top ?? 0, 2);
    const [low, high] = [style.signed(-(top ?? 0)), `${style.signed(top ?? 0)} nats`];
    const ramp = element("div", "ramp", ...rampParts("influence", low, "0", high));
    const meaning =
      this.batch === "update"
        ? "Blue, bar above: training on this token raises entropy. Orange, bar below: lowers it."
        : "Blue, bar above: the policy becomes less sure here. Orange, bar below: surer. One scale for both.";
    this.legend.replaceChildren(
      element("div", "legend-words", element("p", "dim", meaning), ramp),
      ...channels.map((name) => element("h3", "", MAP_TITLES[name])),
    );
  }

  rowNode(row, topShare) {
    const group = this.structure.groups[row.group];
    const mark = row.accepted === null || this.batch === "evaluation" ? null : acceptedMark(row.accepted);
    const onclick = () => this.select(row.response === this.selected ? null : row.response);
    const meta = element("div", "probe-meta", { onclick }, element("b", "", mark, ` response ${row.response}`));
    const line = (name, text) => meta.append(element("span", "key", name), element("span", "number", text));
    if (row.reward !== null) line("reward", fixed(row.reward, 2));
    if (this.batch === "update") {
      if (row.advantage !== null) line("advantage", signed(row.advantage, 2));
      line("share", numberStyle(topShare).signed(row.share));
      meta.append(divergingBar(row.share, topShare));
    } else {
      const change = (value) => (value === null ? MISSING : numberStyle(Math.abs(value)).signed(value));
      line("predicted", change(row.entropy_change));
      line("measured", change(row.entropy_change_measured));
      line("entropy", fixed(row.entropy, 3));
    }
    const maps = this.channels.map(() => element("div", "map", element("p", "dim", row.text)));
    const prompt = element("div", "prompt-line mono", group.text);
    const data = { "data-response": row.response, "data-maps": this.channels.length };
    return Object.assign(element("section", "probe-row", data, meta, prompt, ...maps), { probeRow: row, maps });
  }

  async fill(node) {
    const { channels, top } = this;
    try {
      const whole = await this.texts.get(node.probeRow.response, MAPS[nextOf(Object.keys(BATCHES), this.batch)]);
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

  mark() {
    for (const node of this.nodes) {
      const isSelected = node.probeRow.response === this.selected;
      node.classList.toggle("current", isSelected);
      if (isSelected) node.scrollIntoView({ block: "nearest" });
    }
  }

  /* ---------- living ---------- */

  mounted() {
    this.charts.draw();
    this.plot.draw();
    this.drawList();
    this.watchWidth(this.charts.node, () => this.charts.draw());
    this.watchWidth(this.plot.node, () => this.plot.draw());
  }

  update() {
    this.charts.draw();
  }

  move(direction) {
    const current = this.nodes.find((node) => node.probeRow.response === this.selected);
    const next = neighbourIn(this.nodes, current, direction);
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
