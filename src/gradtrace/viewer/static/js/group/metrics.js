// Every number of one token, in words; the readout and the dock both show them.

import { CREDIT_NAMES } from "../channels.js";
import { fixed, numberStyle, signed } from "../format.js";
import { LIKELIER } from "../meaning.js";
import { hexOf } from "../token_text.js";

/** [{name, text, share, tone}]: share 0…1 and tone (a colour variable) make a small bar. */
export function tokenMetrics(group, token, context) {
  const { response, tops, credit: shown } = context;
  const lines = [];
  const entropy = group.values("entropy")?.[token];
  if (Number.isFinite(entropy)) {
    lines.push({ name: "entropy", text: `${fixed(entropy, 3)} nats`, share: entropy / tops.entropy, tone: "e4" });
  }
  const logProb = group.values("log_prob")?.[token];
  if (Number.isFinite(logProb)) {
    const probability = Math.exp(logProb);
    const shown = probability >= 0.01 ? fixed(probability, 2) : probability.toExponential(0);
    lines.push({ name: "log-prob", text: `${fixed(logProb, 3)} (p ${shown})` });
  }
  const mismatch = group.values("mismatch")?.[token];
  if (Number.isFinite(mismatch) && Math.abs(mismatch) >= 5e-4) {
    lines.push({ name: "trainer/sampler", text: `ratio ${fixed(Math.exp(mismatch), 3)}` });
  }
  for (const credit of [...group.scores].sort((a) => (a === shown ? -1 : 1))) {
    const value = group.values("influence", credit)[token];
    const name = credit === shown ? "influence" : credit === LIKELIER ? "if likelier" : `by ${CREDIT_NAMES[credit]}`;
    const top = tops[`influence_${credit}`];
    const tone = value < 0 ? "n4" : "p4";
    if (Number.isFinite(value))
      lines.push({ name, text: numberStyle(top).signed(value), share: Math.abs(value) / top, tone });
    else if (credit === shown) lines.push({ name, text: "not captured" });
  }
  const deltaV = group.values("delta_v")?.[token];
  if (Number.isFinite(deltaV)) {
    const error = fixed(group.channels.get("delta_v_stderr")[token], 3);
    const tone = deltaV < 0 ? "n4" : "p4";
    lines.push({ name: "ΔV", text: `${signed(deltaV, 3)} ± ${error}`, share: Math.abs(deltaV) / tops.delta_v, tone });
  }
  for (const [channel, name] of Object.entries({ reference_gap: "to reference", token_grad_share: "gradient share" })) {
    const value = group.values(channel)?.[token];
    if (Number.isFinite(value)) lines.push({ name, text: numberStyle(Math.abs(value)).signed(value) });
  }
  if (group.isPassedOver(token)) lines.push({ name: "clipped", text: "training takes no step on it" });
  if (response.advantage !== null) lines.push({ name: "advantage", text: signed(response.advantage, 2) });
  return lines;
}

export function tokenBytes(group, token) {
  const hex = hexOf(group.entry(token).bytes);
  return hex.length > 26 ? `${hex.slice(0, 23)} …` : hex;
}
