// The things a heat map can show, and how each becomes colour.

import { signedClass, signedClassName, unsignedClass, unsignedClassName } from "./scales.js";

export const CREDIT_NAMES = { loss_term: "loss term", tail: "tail", position: "position", likelier: "likelier" };
export const CREDIT_HINT =
  "loss term: this token's own term of the objective only. tail: the same, in the last block's weights. position: everything that flows through this token's position, later tokens' losses included. likelier: a step that makes the token likelier, whatever training does with it.";

export const CHANNELS = {
  entropy: { title: "Entropy", ramp: "e", signed: false, unit: "nats" },
  influence: { title: "Influence", ramp: "", signed: true, unit: "influence" },
  delta_v: { title: "ΔV", ramp: "", signed: true, unit: "change of the expected reward" },
  log_prob: { title: "Log-prob", ramp: "l", signed: false, unit: "nats" },
  mismatch: {
    title: "Ratio",
    ramp: "",
    signed: true,
    unit: "nats: ln of the trainer’s over the sampler’s probability",
  },
  advantage: { title: "Advantage", ramp: "", signed: true, unit: "of the whole response" },
  no_step: { title: "Clip mask", ramp: "l", signed: false, unit: "where training takes no step" },
  reference_gap: { title: "KL", ramp: "", signed: true, unit: "nats, log-prob minus the reference’s" },
  token_grad_share: { title: "Gradient share", ramp: "", signed: true, unit: "of ‖g‖² of its optimizer step" },
};

/** Why a group may lack a channel. */
export const WHY_MISSING = {
  entropy: "This run’s files hold no entropies: rollouts that were imported may have none.",
  log_prob: "This run’s files hold no log-probs: rollouts that were imported may have none.",
  advantage: "This run’s files hold no advantages.",
  influence: "No influence was stored for this group; above stands why.",
  delta_v: "Not measured here: gradtrace counterfactual RUN --step S --group G measures it.",
  mismatch: "This run’s files hold no ratio: it is written where the sampler reports log-probs of its own.",
  no_step: "This run’s files hold no clip mask: influence traces have it.",
  reference_gap:
    "This step’s files hold no distance to a reference: blame has it (trainer.blame.enable) where training knows a reference.",
  token_grad_share:
    "This step has no blame: trainer.blame.enable=true writes it every trainer.blame.write_every steps.",
};
/** What the colours mean, in channels that one sentence explains. */
export const MEANINGS = {
  entropy: "How undecided the model was when it chose this token. Stronger colour: more undecided.",
  log_prob: "How unlikely the token was that was sampled. Stronger colour: less likely.",
  no_step: "Coloured tokens take no step: they were clipped.",
  reference_gap: "Positive, bar above: the policy likes the token more than the reference does. Negative: less.",
  token_grad_share:
    "Positive, bar above: the token’s own term points along the step’s gradient. Negative: against it. All shares of a step add up to 1.",
};

export function classOf(channel, value, top) {
  if (!(top > 0) || !Number.isFinite(value)) return 0;
  return CHANNELS[channel].signed ? signedClass(value, top) : unsignedClass(value, top);
}

export function classNameOf(channel, level) {
  return CHANNELS[channel].signed ? signedClassName(level) : unsignedClassName(CHANNELS[channel].ramp, level);
}

/** The classes of a legend, from low to high. */
export function rampOf(channel) {
  const { signed, ramp } = CHANNELS[channel];
  if (signed) return ["n5", "n4", "n3", "n2", "n1", "zero", "p1", "p2", "p3", "p4", "p5"];
  return ["zero", ...[1, 2, 3, 4, 5, 6].map((level) => ramp + level)];
}
