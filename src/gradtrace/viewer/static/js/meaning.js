// What a score is, in one sentence: whose step, what it changes, in which geometry, by which credit, with sign and unit.

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
