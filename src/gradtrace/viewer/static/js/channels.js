// The six things a heat map can show, and how each becomes colour.

import { signedClass, signedClassName, unsignedClass, unsignedClassName } from "./scales.js";

export const CREDIT_NAMES = { loss_term: "loss term", tail: "tail", position: "position", likelier: "likelier" };
export const CREDIT_HINT =
  "loss term: this token's own term of the objective only. tail: the same, in the last block's weights. position: everything that flows through this token's position, later tokens' losses included. likelier: a step that makes the token likelier, whatever training does with it.";

export const CHANNELS = {
  entropy: { title: "Entropy", ramp: "e", signed: false, unit: "nats" },
  influence: { title: "Influence", ramp: "", signed: true, unit: "influence" },
  delta_v: { title: "ΔV", ramp: "", signed: true, unit: "change of the expected reward" },
  log_prob: { title: "Log-prob", ramp: "l", signed: false, unit: "nats" },
  mismatch: { title: "Mismatch", ramp: "", signed: true, unit: "nats, trainer minus sampler" },
  advantage: { title: "Advantage", ramp: "", signed: true, unit: "of the whole response" },
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
