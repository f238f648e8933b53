// Numbers as people read them, and what a score means in words.

const SHORTEST_SHARED_START = 24;
const MINUS = "\u2212";
export const MISSING = "–";

export function fixed(value, decimals = 2) {
  if (!Number.isFinite(value)) return MISSING;
  const text = Math.abs(value).toFixed(decimals);
  return (value < 0 && Number(text) !== 0 ? MINUS : "") + text;
}

/** A number with its sign, plus included; a value that rounds to zero has none. */
export function signed(value, decimals = 2) {
  if (!Number.isFinite(value)) return MISSING;
  const text = Math.abs(value).toFixed(decimals);
  return (Number(text) === 0 ? "" : value < 0 ? MINUS : "+") + text;
}

/** Influence has no natural size: the decimals follow the largest value in view, and tiny or huge scales use exponents. */
export function numberStyle(top, digits = 3) {
  const size = Math.abs(top);
  const exponential = size > 0 && (size < 1e-3 || size >= 1e6);
  const decimals = size > 0 ? Math.max(0, Math.min(6, digits - 1 - Math.floor(Math.log10(size)))) : 2;
  const shown = (usual, plus) => (value) => {
    if (!Number.isFinite(value) || !exponential) return usual(value, decimals);
    return value === 0 ? "0" : (value < 0 ? MINUS : plus) + exponent(Math.abs(value), digits - 1);
  };
  return { plain: shown(fixed, ""), signed: shown(signed, "+") };
}

function exponent(value, decimals = 2) {
  return value
    .toExponential(decimals)
    .replace("e-", "e" + MINUS)
    .replace("e+", "e");
}

/** A number of unknown size, such as a metric, with about four significant digits. */
export function general(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return MISSING;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return (value < 0 ? MINUS : "") + exponent(size);
  const decimals = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return fixed(value, Number.isInteger(value) ? 0 : decimals);
}

export function count(value) {
  return value.toLocaleString("en-US");
}

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function ago(seconds) {
  if (seconds < 5) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

/** How many characters all texts have in common at their beginning; 0 if so few that they are worth showing. */
export function sharedStart(texts) {
  if (texts.length < 2) return 0;
  let { length } = texts[0];
  for (const text of texts) {
    let shared = 0;
    while (shared < length && text[shared] === texts[0][shared]) shared += 1;
    length = shared;
  }
  return length >= SHORTEST_SHARED_START ? length : 0;
}

export const LIKELIER = "likelier";

const STEPS = {
  training_loss: "its own term of the training loss",
  log_prob_advantage: "its log-prob weighted by the advantage",
  log_prob_reward: "its log-prob weighted by the reward",
  log_prob: "its log-prob",
};
const CREDITS = {
  loss_term: "by the token’s own loss term",
  tail: "by the token’s own loss term, in the last block’s weights",
  position: "by everything that flows through the token’s position",
  likelier: "by the token’s own log-prob",
};
const CONTRASTS = {
  mean: "mean of the accepted responses minus mean of the rejected ones",
  sum: "sum over the accepted responses minus sum over the rejected ones",
  advantage: "responses weighted by their advantages",
};

function geometryWords(meta) {
  const name = meta.optimizer ? `${meta.optimizer}’s` : "the optimizer’s";
  const words = {
    optimizer: `in ${name} geometry`,
    identity: "in plain gradient geometry",
    inverse: `in inverse-Hessian geometry${meta.hessian_source ? ` of ${meta.hessian_source} gradients` : ""}`,
  };
  const mode = meta.geometry ?? meta.hessian_mode;
  return words[mode] ?? (mode ? `in ${mode} geometry` : "");
}

/** Is the step of this trace already the one that makes a token likelier? */
export function stepIsLikelier(meta) {
  return meta.output_function === "log_prob";
}

/** What is asked of a token: what training on it does, or what making it likelier would do. */
export function question(meta, score) {
  const makes = score === LIKELIER || stepIsLikelier(meta);
  return makes ? "what making a token likelier would do" : "what training on a token does";
}

/** What a positive score says. */
export function signWords(meta, score) {
  const makes = score === LIKELIER || stepIsLikelier(meta);
  const training = meta.target === "log_prob" ? "training on this token" : "a step along this token’s gradient";
  return `${makes ? "making this token likelier" : training} helps the accepted responses against the rejected ones`;
}

/** Which quantity changes by the score, and per what. */
export function unitWords(meta) {
  if (meta.target === "log_prob") return "change in the log-prob contrast per unit of learning rate";
  return "change in objective per unit step";
}

/** The whole sentence. */
export function scoreSentence(meta, score) {
  const step = score === LIKELIER ? STEPS.log_prob : (STEPS[meta.output_function] ?? meta.output_function);
  const contrast = CONTRASTS[meta.contrastive_agg];
  const scope =
    meta.accepted_rejected_scope === "all_selected"
      ? `over all selected responses of the ${meta.mini_batches > 1 ? "mini-batch" : "step"}`
      : "";
  const parts = [
    `${unitWords(meta)}${contrast ? ` (${[contrast, scope].filter(Boolean).join(", ")})` : ""}`,
    step ? `when a step follows ${step}` : "",
    geometryWords(meta),
    CREDITS[score] ?? "",
  ];
  return `Score: ${parts.filter(Boolean).join(", ")}.`;
}
