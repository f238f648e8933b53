// Every number of one token, in words; the readout and the dock both show them.

import { CREDIT_NAMES } from "../channels.js";
import { fixed, numberStyle, signed } from "../format.js";
import { LIKELIER } from "../meaning.js";
import { hexOf } from "../token_text.js";

/** [{name, text, share, tone}]: share 0…1 and tone (a colour variable) make a small bar. */
export function tokenMetrics(group, token, context) {
  const { response, tops, credit: shown } = context;
  const lines = [];
  const here = (channel) => group.values(channel)?.[token];
  /** A line where there is a value; `top`: it has a bar, and a sign if no `tone` is given. */
  const add = (name, value, text, top = null, tone = value < 0 ? "n4" : "p4") => {
    if (!Number.isFinite(value)) return;
    lines.push({ name, text: text(value), ...(top === null ? {} : { share: Math.abs(value) / top, tone }) });
  };
  add("entropy", here("entropy"), (value) => `${fixed(value, 3)} nats`, tops.entropy, "e4");
  add("log-prob", here("log_prob"), (value) => {
    const probability = Math.exp(value);
    return `${fixed(value, 3)} (p ${probability >= 0.01 ? fixed(probability, 2) : probability.toExponential(0)})`;
  });
  if (Math.abs(here("mismatch")) >= 5e-4)
    add("trainer/sampler", here("mismatch"), (value) => `ratio ${fixed(Math.exp(value), 3)}`);
  for (const credit of [...group.scores].sort((a) => (a === shown ? -1 : 1))) {
    const value = group.values("influence", credit)[token];
    const name = credit === shown ? "influence" : credit === LIKELIER ? "if likelier" : `by ${CREDIT_NAMES[credit]}`;
    const top = tops[`influence_${credit}`];
    add(name, value, numberStyle(top).signed, top);
    if (!Number.isFinite(value) && credit === shown) lines.push({ name, text: "not captured" });
  }
  const error = () => fixed(group.channels.get("delta_v_stderr")[token], 3);
  add("ΔV", here("delta_v"), (value) => `${signed(value, 3)} ± ${error()}`, tops.delta_v);
  const itself = (value) => numberStyle(Math.abs(value)).signed(value);
  add("to reference", here("reference_gap"), itself);
  add("gradient share", here("token_grad_share"), itself);
  if (group.isPassedOver(token)) lines.push({ name: "clipped", text: "training takes no step on it" });
  if (response.advantage !== null) lines.push({ name: "advantage", text: signed(response.advantage, 2) });
  return lines;
}

export function tokenBytes(group, token) {
  const hex = hexOf(group.entry(token).bytes);
  return hex.length > 26 ? `${hex.slice(0, 23)} …` : hex;
}
