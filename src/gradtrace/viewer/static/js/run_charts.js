// Which curves the run page draws, from which metrics, and why one may be empty.

import { fixed, signed } from "./format.js";

const off = (kind) => (run) => run.whyNone(kind);
const notLogged = (metric) => (run) => (run.isLive ? "nothing written yet" : `this run logged no ${metric}`);

const percentTick = (value) => `${Number((100 * value).toPrecision(6))} %`;
const percent = (value) => `${fixed(100 * value, 1)} %`;
const thousandths = (value) => fixed(value, 3);
/** Options of a chart of shares. */
const SHARES = { includesZero: true, format: percent, tick: percentTick };

const line = (metric, more = {}) => ({ label: "", points: (run) => run.series(metric), ...more });

function single(key, title, unit, metric, options = {}) {
  return { key, title, unit, lines: [line(metric)], why: notLogged(metric), ...options };
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
  const total = row["timing_s/influence_total"] ?? sumOf(row, "timing_s/influence_");
  const step = row["timing_s/step"];
  return total > 0 && step > total ? total / (step - total) : undefined;
}

function sumOf(row, prefix) {
  return Object.entries(row).reduce(
    (sum, [name, value]) => (name.startsWith(prefix) && typeof value === "number" ? sum + value : sum),
    0,
  );
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
  const pairs = entropyChanges(run).map(({ predicted, measured }) => [predicted, measured]);
  if (pairs.length < 3) return "";
  const mean = (index) => pairs.reduce((sum, pair) => sum + pair[index], 0) / pairs.length;
  const [a, b] = [mean(0), mean(1)];
  const sum = (f) => pairs.reduce((total, [x, y]) => total + f(x - a, y - b), 0);
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
    line(PREDICTED, {
      label: "pred.",
      dashed: true,
      band: standardErrors(PREDICTED, "entropy_probe/stderr_predicted"),
    }),
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
  const charts = [
    {
      key: "tracin-signs",
      title: "Positive and negative scores",
      unit: "share of responses",
      ...SHARES,
      lines: [own("positive_ratio", { label: "pos." }), own("negative_ratio", { label: "neg.", dashed: true })],
      note: () => "solid positive, dashed negative",
    },
    {
      key: "tracin-scores",
      title: "Mean score",
      unit: "band: ± one standard deviation",
      includesZero: true,
      cuts: true,
      lines: [own("mean_ip", { band: standardErrors("tracin/mean_ip", "tracin/std_ip") })],
      note: (each) => {
        const [first] = each.series("tracin/plain_mean_ip");
        return first ? `step ${first.step}, before Adam has a state, has another unit` : "";
      },
    },
    { key: "tracin-kept", title: "Responses kept", unit: "share", ...SHARES, lines: [own("selected_ratio")] },
    { key: "tracin-reward", title: "Validation reward", unit: "mean", includesZero: true, lines: [own("val_reward")] },
    { key: "tracin-loss", title: "Validation loss", unit: "−mean of A·Σ log-prob", lines: [own("val_loss")] },
    {
      key: "tracin-certain",
      title: "Scores whose sign is certain",
      unit: "share, 90 % bootstrap",
      ...SHARES,
      lines: [own("certain_share")],
    },
    {
      key: "tracin-norms",
      title: "Gradient norms",
      unit: "",
      includesZero: true,
      cuts: true,
      lines: [own("val_grad_norm", { label: "val." }), own("train_grad_norm", { label: "train", dashed: true })],
      note: () => "solid validation, dashed training batch",
    },
    {
      key: "tracin-flips",
      title: "Dropped responses",
      unit: "share of flipped and of other rewards",
      ...SHARES,
      lines: [
        own("dropped_of_flipped", { label: "flipped" }),
        own("dropped_of_unflipped", { label: "other", dashed: true }),
      ],
      note: () => "solid flipped rewards, dashed the others",
    },
  ];
  const isLogged = (chart) => chart.lines.some((each) => each.points(run).length > 0);
  return charts
    .filter((chart, index) => index < 2 || isLogged(chart))
    .map((chart) => ({ ...chart, why: off("tracin") }));
}

export const MAIN_CHARTS = [
  single("reward", "Reward", "mean", "critic/rewards/mean", { includesZero: true, format: thousandths }),
  single("entropy", "Entropy", "nats per token", "actor/entropy", { includesZero: true, format: thousandths }),
  single("length", "Response length", "tokens", "response_length/mean", { format: (value) => fixed(value, 2) }),
  {
    key: "selected",
    title: "Responses selected",
    unit: "share in mixed groups",
    ...SHARES,
    lines: [{ label: "", points: selectedShare }],
    why: off("influence_trace"),
  },
  {
    key: "overhead",
    title: "Influence overhead",
    unit: "of the step's other time",
    ...SHARES,
    lines: [{ label: "", points: (run) => run.series("influence overhead", overheadOf) }],
    why: off("influence_trace"),
  },
  { ...ENTROPY_CHANGE_CHART, unit: "nats per step" },
];

/** How well scores predicted real optimizer steps, beside the baseline that needs no gradient; of runs that checked. */
const VALIDITY_CHART = {
  key: "validity",
  title: "Do scores predict training?",
  unit: "Spearman",
  includesZero: true,
  format: (value) => fixed(value, 2),
  lines: [line("influence_trace/validity"), line("influence_trace/validity_baseline", { label: "base", dashed: true })],
  note: () => "solid the scores, dashed |A|(1−p)",
  why: (run) =>
    run.traces.influence_trace.present
      ? "set trainer.influence_trace.verify_every=10 in training, or run gradtrace verify"
      : run.whyNone("influence_trace"),
};

/** What part of the update exists because the sampler's log-probs are not the trainer's; of runs where they differ. */
const MISMATCH_CHART = {
  key: "mismatch",
  title: "Update due to sampler ≠ trainer",
  unit: "share",
  ...SHARES,
  lines: [line("mismatch/share_of_update"), line("mismatch/share_of_squared_norm", { label: "‖g‖²", dashed: true })],
  note: () => "solid ‖g − g₁‖ / ‖g‖, dashed of the squared norm",
  why: notLogged("mismatch/share_of_update"),
};

/** Charts of runs that have measured it. */
export const MEASURED_CHARTS = [VALIDITY_CHART, MISMATCH_CHART];

/** A chart of any metric, by its name. */
export function metricChart(name) {
  return single(name, name, "", name);
}
