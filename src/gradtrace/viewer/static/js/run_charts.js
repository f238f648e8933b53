// Which curves the run page draws, from which metrics, and why one may be empty.

import { fixed, signed } from "./format.js";
import { meanOf } from "./statistics.js";

const off = (kind) => (run) => run.whyNone(kind);
const notLogged = (metric) => (run) => (run.isLive ? "nothing written yet" : `this run logged no ${metric}`);

const percentTick = (value) => `${Number((100 * value).toPrecision(6))} %`;
const percent = (value) => `${fixed(100 * value, 1)} %`;
const thousandths = (value) => fixed(value, 3);
/** Options of a chart of shares. */
const SHARES = { includesZero: true, format: percent, tick: percentTick };

const computed = (points, more = {}) => ({ label: "", points, ...more });
const line = (metric, more = {}) => computed((run) => run.series(metric), more);
const dashed = (metric, label, more = {}) => line(metric, { label, dashed: true, ...more });

/** A chart, see Chart; `options`: what else it may have. */
const chart = (key, title, unit, lines, options = {}) => ({ key, title, unit, lines, ...options });

function single(key, title, unit, metric, options = {}) {
  return chart(key, title, unit, [line(metric)], { why: notLogged(metric), ...options });
}

/** Share of the step's responses that went into the influence trace. */
function selectedShare(run) {
  return run.series("share of responses selected", (row) => {
    const responses = run.traces.entropy_trace.steps.get(row.step)?.responses;
    const selected = row["influence_trace/selected_responses"];
    if (responses && selected !== undefined) return selected / responses;
    const [mixed, total] = [row["influence_trace/uid_mixed"], row["influence_trace/uid_total"]];
    return total ? mixed / total : undefined;
  });
}

/** Time of tracing over the time of everything else. */
export function overheadOf(row) {
  const own = Object.keys(row).filter((name) => name.startsWith("timing_s/influence_"));
  const total = row["timing_s/influence_total"] ?? own.reduce((sum, name) => sum + row[name], 0);
  const step = row["timing_s/step"];
  return total > 0 && step > total ? total / (step - total) : undefined;
}

const MEASURED = "entropy_probe/delta_h_measured";
const PREDICTED = "entropy_probe/delta_h_predicted";

/** [{step, predicted, measured}] of the steps that have both. */
export function entropyChanges(run) {
  const measured = new Map(run.series(MEASURED).map(({ step, value }) => [step, value]));
  return run
    .series(PREDICTED)
    .filter(({ step }) => measured.has(step))
    .map(({ step, value }) => ({ step, predicted: value, measured: measured.get(step) }));
}

/** How well the probe predicted: Pearson's r over all steps. */
function correlationText(run) {
  const pairs = entropyChanges(run);
  if (pairs.length < 3) return "";
  const [a, b] = [meanOf(pairs.map(({ predicted }) => predicted)), meanOf(pairs.map(({ measured }) => measured))];
  const sum = (f) => pairs.reduce((total, { predicted, measured }) => total + f(predicted - a, measured - b), 0);
  return `, r = ${fixed(sum((x, y) => x * y) / Math.sqrt(sum((x) => x * x) * sum((_, y) => y * y)), 2)}`;
}

/** A band of ± another metric around a metric. */
function standardErrors(metric, error) {
  return (run) =>
    run.series(metric).flatMap(({ step, value }) => {
      const half = run.rows.get(step)[error];
      return Number.isFinite(half) ? [{ step, low: value - half, high: value + half }] : [];
    });
}

/** Predicted and measured entropy change of every step, each with its standard error. */
export const ENTROPY_CHANGE_CHART = {
  key: "entropy-change",
  title: "Entropy change",
  unit: "nats per step, band: ± one standard error",
  includesZero: true,
  format: (value) => signed(value, 4),
  lines: [
    line(MEASURED, { band: standardErrors(MEASURED, "entropy_probe/stderr") }),
    dashed(PREDICTED, "pred.", { band: standardErrors(PREDICTED, "entropy_probe/stderr_predicted") }),
  ],
  note: (run) => `solid measured, dashed predicted${correlationText(run)}`,
  why: (run) =>
    run.traces.entropy_probe.present && !run.rows.size
      ? "A probe of one checkpoint: curves need trainer.entropy_probe.every=1 in training."
      : run.whyNone("entropy_probe"),
};

/** Curves of the TracIn page: those of these that the run has logged. The run page charts any other tracin/ metric. */
export function tracinCharts(run) {
  const own = (name, more = {}) => line(`tracin/${name}`, more);
  const before = (each) => {
    const [first] = each.series("tracin/plain_mean_ip");
    return first ? `step ${first.step}, before Adam has a state, has another unit` : "";
  };
  const signs = [own("positive_ratio", { label: "pos." }), dashed("tracin/negative_ratio", "neg.")];
  const scores = [own("mean_ip", { band: standardErrors("tracin/mean_ip", "tracin/std_ip") })];
  const norms = [own("val_grad_norm", { label: "val." }), dashed("tracin/train_grad_norm", "train")];
  const flips = [own("dropped_of_flipped", { label: "flipped" }), dashed("tracin/dropped_of_unflipped", "other")];
  const sizes = { includesZero: true, cuts: true };
  const charts = [
    chart("tracin-signs", "Positive and negative scores", "share of responses", signs, {
      ...SHARES,
      note: "solid positive, dashed negative",
    }),
    chart("tracin-scores", "Mean score", "band: ± one standard deviation", scores, { ...sizes, note: before }),
    chart("tracin-kept", "Responses kept", "share", [own("selected_ratio")], SHARES),
    chart("tracin-reward", "Validation reward", "mean", [own("val_reward")], { includesZero: true }),
    chart("tracin-loss", "Validation loss", "−mean of A·Σ log-prob", [own("val_loss")]),
    chart("tracin-certain", "Scores whose sign is certain", "share, 90 % bootstrap", [own("certain_share")], SHARES),
    chart("tracin-norms", "Gradient norms", "", norms, { ...sizes, note: "solid validation, dashed training batch" }),
    chart("tracin-flips", "Dropped responses", "share of flipped and of other rewards", flips, {
      ...SHARES,
      note: "solid flipped rewards, dashed the others",
    }),
  ];
  const isLogged = ({ lines }) => lines.some((each) => each.points(run).length > 0);
  return charts.filter((each, index) => index < 2 || isLogged(each)).map((each) => ({ ...each, why: off("tracin") }));
}

const OF_INFLUENCE = { ...SHARES, why: off("influence_trace") };
const overheads = (run) => run.series("influence overhead", overheadOf);

export const MAIN_CHARTS = [
  single("reward", "Reward", "mean", "critic/rewards/mean", { includesZero: true, format: thousandths }),
  single("entropy", "Entropy", "nats per token", "actor/entropy", { includesZero: true, format: thousandths }),
  single("length", "Response length", "tokens", "response_length/mean", { format: (value) => fixed(value, 2) }),
  chart("selected", "Responses selected", "share in mixed groups", [computed(selectedShare)], OF_INFLUENCE),
  chart("overhead", "Influence overhead", "of the step's other time", [computed(overheads)], OF_INFLUENCE),
  { ...ENTROPY_CHANGE_CHART, unit: "nats per step" },
];

/** How well scores predicted real optimizer steps, beside the baseline that needs no gradient; of runs that checked. */
const VALIDITY_CHART = {
  key: "validity",
  title: "Do scores predict training?",
  unit: "Spearman",
  includesZero: true,
  format: (value) => fixed(value, 2),
  lines: [line("influence_trace/validity"), dashed("influence_trace/validity_baseline", "base")],
  note: "solid the scores, dashed |A|(1−p)",
  why: (run) =>
    run.traces.influence_trace.present
      ? "set trainer.influence_trace.verify_every=10 in training, or run gradtrace verify"
      : run.whyNone("influence_trace"),
};

/** Whether the influence of measured groups adds up to what the optimizer step changed; of runs that measure groups. */
const BOOKS_CHART = {
  key: "influence-books",
  title: "Influence: predicted over measured",
  unit: "ratio, measured groups",
  includesZero: true,
  format: (value) => fixed(value, 2),
  lines: [line("influence_trace/predicted_over_measured")],
  note: "1: the influence of a group’s tokens is what the step changed, less momentum",
  why: notLogged("influence_trace/predicted_over_measured"),
};

/** What part of the update exists because the sampler's log-probs are not the trainer's; of runs where they differ. */
const MISMATCH_CHART = {
  key: "mismatch",
  title: "Update due to sampler ≠ trainer",
  unit: "share",
  ...SHARES,
  lines: [line("mismatch/share_of_update"), dashed("mismatch/share_of_squared_norm", "‖g‖²")],
  note: "solid ‖g − g₁‖ / ‖g‖, dashed of the squared norm",
  why: notLogged("mismatch/share_of_update"),
};

/** Charts of runs that have measured it. */
export const MEASURED_CHARTS = [BOOKS_CHART, VALIDITY_CHART, MISMATCH_CHART];

/** A chart of any metric, by its name. */
export function metricChart(name) {
  return single(name, name, "", name);
}
