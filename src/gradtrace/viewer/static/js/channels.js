// The four things a heat map can show, and how each becomes colour.

import { signedClass, signedClassName, unsignedClass, unsignedClassName } from "./scales.js";

export const CREDIT_NAMES = { position: "position", loss_term: "loss term" };
export const CREDIT_HINT =
  "position: everything that flows through this token's position, later tokens' losses included. loss term: this token's own term of the objective only.";

export const CHANNELS = {
  entropy: { title: "Entropy", ramp: "e", signed: false, unit: "nats" },
  influence: { title: "Influence", ramp: "", signed: true, unit: "change in objective per unit step" },
  log_prob: { title: "Log-prob", ramp: "l", signed: false, unit: "nats" },
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
