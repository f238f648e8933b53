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

/** Numbers without a natural size: the decimals follow the largest value in view, and tiny or huge scales use exponents. */
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

/** Units of nats, the first that gives the largest value in view a readable number. @type {[number, string][]} */
const NATS = [
  [1, "nats"],
  [1e-3, "m-nats"],
  [1e-6, "µ-nats"],
  [1e-9, "n-nats"],
];

/** Numbers in nats by the largest in view: {plain, signed, unit}; as in gradtrace/instruments/influence/books.py. */
export function natsStyle(top, digits = 3) {
  const size = Number.isFinite(top) ? Math.abs(top) : 0;
  const [scale, unit] = NATS.find(([each]) => size >= 0.01 * each) ?? NATS.at(size > 0 ? -1 : 0);
  const decimals = size > 0 ? Math.max(0, Math.min(6, digits - 1 - Math.floor(Math.log10(size / scale)))) : 2;
  return {
    plain: (value) => fixed(value / scale, decimals),
    signed: (value) => signed(value / scale, decimals),
    unit,
  };
}

/** Numbers of a score: nats, or the scores of captured factors, which have no natural size. */
export function scoreStyle(unit, top, digits = 3) {
  return unit === "nats" ? natsStyle(top, digits) : { ...numberStyle(top, digits), unit: "" };
}

/** A number with its unit, if it has one. */
export function withUnit(text, { unit }) {
  return unit && text !== MISSING ? `${text} ${unit}` : text;
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

const STEPS = {
  training_loss: "its own term of the training loss",
  log_prob_advantage: "its log-prob weighted by the advantage",
  log_prob_reward: "its log-prob weighted by the reward",
  log_prob: "its log-prob",
};
const CREDITS = {
  influence_loss_term: "by the token’s own loss term",
  influence_position: "by everything that flows through the token’s position",
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

/** Did every optimizer step start from an empty Adam state? Then scores say what the step did to a token. */
function isEarly({ updates = [] }) {
  return updates.length > 0 && updates.every((each) => each.second_moment === "batch_gradient");
}

/** What is asked of a token. */
export function question(meta) {
  if (meta.unit === "nats" && isEarly(meta)) return "what the step did to a token";
  return meta.output_function === "log_prob"
    ? "what making a token likelier would do"
    : "what training on a token does";
}

/** What a positive score says. */
export function signWords(meta, score) {
  if (meta.unit === "nats") {
    const whose = score === "influence_own" ? "its own prompt’s objective" : "the objective";
    return isEarly(meta)
      ? "the step raised this token’s term of the objective"
      : `training on this token raised ${whose}`;
  }
  const training = meta.target === "log_prob" ? "training on this token" : "a step along this token’s gradient";
  const makes = meta.output_function === "log_prob";
  return `${makes ? "making this token likelier" : training} helps the accepted responses against the rejected ones`;
}

/** Which quantity changes by the score, and per what. */
export function unitWords(meta) {
  if (meta.unit === "nats") return "change of the objective by this optimizer step";
  if (meta.target === "log_prob") return "change in the log-prob contrast per unit of learning rate";
  return "change in objective per unit step";
}

/** The whole sentence. */
export function scoreSentence(meta, score) {
  if (meta.unit === "nats") {
    const gradient = score === "influence_own" ? "the gradient of the token’s own group" : "this mini-batch’s gradient";
    return `Influence: change of the token’s own term of the objective, in nats, by what ${gradient} contributes to the optimizer step.`;
  }
  const step = STEPS[meta.output_function] ?? meta.output_function;
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
  return `Score from captured factors: ${parts.filter(Boolean).join(", ")}.`;
}
