// What the TracIn page says about a step as a whole.

import { element, fact, filledBar } from "../dom.js";
import { count, fixed, MISSING, numberStyle } from "../format.js";
import { meanOf } from "../scales.js";

const MEANING = "Positive: a gradient step on this response lowers the validation loss. Negative: it raises it.";

export function scoreFacts({ candidates, validation, meta }) {
  const finite = candidates.filter((row) => Number.isFinite(row.score));
  const kept = candidates.filter((row) => row.kept).length;
  const positive = finite.filter((row) => row.score > 0).length;
  const prompts = new Set(validation.map((row) => row.group)).size;
  const reward = meanOf(validation.map((row) => row.reward));
  const facts = element(
    "div",
    "facts",
    fact(`${count(kept)}/${count(candidates.length)}`, "responses kept"),
    fact(finite.length ? `${fixed((100 * positive) / finite.length, 0)} %` : MISSING, "positive"),
  );
  if (validation.length)
    facts.append(fact(count(prompts), "validation prompts"), fact(fixed(reward, 2), "their mean reward"));
  if (Number.isFinite(meta.val_loss))
    facts.append(fact(numberStyle(meta.val_loss).plain(meta.val_loss), "validation loss"));
  return facts;
}

export function diagnosisBox(structure) {
  const { note } = structure.meta;
  const diagnosis = [...(note ? [String(note)] : []), ...structure.diagnosis];
  const box = element("section", "diagnosis strip", element("h2", "", "Diagnosis"));
  const unmeasured = structure.columns.includes("score_low")
    ? ""
    : " How certain their signs are was not measured in this step (trainer.tracin.diagnose_every).";
  if (!diagnosis.length) box.append(element("p", "dim", `Nothing notable in this step's scores.${unmeasured}`));
  else box.append(element("ul", "", ...diagnosis.map((sentence) => element("li", "", sentence))));
  return box;
}

export function histogramHead() {
  const key = (name, words) => element("span", "key", element("i", `swatch ${name}`), words);
  const keys = { "kept-key": "kept", "dropped-key": "dropped", p4: "positive", n4: "negative" };
  const line = element("p", "histogram-keys", ...Object.entries(keys).map(([name, words]) => key(name, words)));
  line.append(element("span", "dim", "Click a bar for its responses."));
  return element("header", "histogram-head", element("h2", "", "Scores"), element("p", "dim", MEANING), line);
}

/** Where the validation gradient is large: its norm by layer group. */
export function layerNorms(meta) {
  const norms = Object.entries(meta.val_norms ?? {}).filter(([, norm]) => Number.isFinite(norm));
  if (!norms.length) return null;
  const top = Math.max(...norms.map(([, norm]) => norm), 1e-300);
  const list = element("dl", "layer-norms");
  for (const [name, norm] of norms) {
    const bar = element("span", "track", filledBar("l4", norm / top));
    const number = element("span", "", numberStyle(top, 3).plain(norm));
    list.append(element("dt", "", name.replaceAll("_", " ")), element("dd", "", bar, number));
  }
  return element("details", "layers", element("summary", "", "Validation gradient by layer, norms"), list);
}
