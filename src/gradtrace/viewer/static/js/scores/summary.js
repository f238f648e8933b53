// What the pages of instruments say about a step as a whole: facts, diagnosis, shares, the validation set.

import { opener } from "../controls.js";
import { append, element, factList, filledBar, passDots, rowOf, tableOf, wideRow } from "../dom.js";
import { MISSING, count, fixed, numberStyle } from "../format.js";
import { extent, largestSize, meanOf } from "../statistics.js";

const MEANING = "Positive: a gradient step on this response lowers the validation loss. Negative: it raises it.";

export function scoreFacts({ candidates, validation, meta }) {
  const finite = candidates.filter((row) => Number.isFinite(row.score));
  const kept = candidates.filter((row) => row.kept).length;
  const positive = finite.filter((row) => row.score > 0).length;
  const prompts = new Set(validation.map((row) => row.group)).size;
  const reward = meanOf(validation.map((row) => row.reward));
  return factList(
    [`${count(kept)}/${count(candidates.length)}`, "responses kept"],
    [finite.length ? `${fixed((100 * positive) / finite.length, 0)} %` : MISSING, "positive"],
    prompts ? [count(prompts), "validation prompts"] : null,
    prompts ? [fixed(reward, 2), "their mean reward"] : null,
    Number.isFinite(meta.val_loss) ? [numberStyle(meta.val_loss).plain(meta.val_loss), "validation loss"] : null,
  );
}

export function diagnosisBox({ meta, diagnosis, columns }) {
  const sentences = [...(meta.note ? [String(meta.note)] : []), ...diagnosis];
  const unmeasured = columns.includes("score_low")
    ? ""
    : " How certain their signs are was not measured in this step (trainer.tracin.diagnose_every).";
  const words = sentences.length
    ? element("ul", "", ...sentences.map((sentence) => element("li", "", sentence)))
    : element("p", "dim", `Nothing notable in this step's scores.${unmeasured}`);
  return element("section", "diagnosis strip", element("h2", "", "Diagnosis"), words);
}

export function histogramHead() {
  const names = { "kept-key": "kept", "dropped-key": "dropped", p4: "positive", n4: "negative" };
  const keys = Object.entries(names).map(([name, words]) =>
    element("span", "key", element("i", `swatch ${name}`), words),
  );
  const how = element("span", "dim", "Click a bar for its responses.");
  const line = element("p", "histogram-keys", ...keys, how);
  return element("header", "histogram-head", element("h2", "", "Scores"), element("p", "dim", MEANING), line);
}

/** Where the validation gradient is large: its norm by layer group. */
export function layerNorms(meta) {
  const norms = Object.entries(meta.val_norms ?? {}).filter(([, norm]) => Number.isFinite(norm));
  if (!norms.length) return null;
  const top = largestSize(
    norms.map(([, norm]) => norm),
    1e-300,
  );
  const lines = norms.flatMap(([name, norm]) => {
    const bar = element("span", "track", filledBar("l4", norm / top));
    const number = element("span", "", numberStyle(top, 3).plain(norm));
    return [element("dt", "", name.replaceAll("_", " ")), element("dd", "", bar, number)];
  });
  const summary = element("summary", "", "Validation gradient by layer, norms");
  return element("details", "layers", summary, element("dl", "layer-norms", ...lines));
}

const LISTS = {
  prompts: "Prompts",
  tokens: "Tokens",
  vocabulary: "Equal tokens together",
  rest: "What no response did",
  cancelled: "Moved against their own advantage",
};

/** @param {{sentence: string, unit: string, [list: string]: any}} report */
export function blameReport(report) {
  const lists = Object.entries(LISTS).map(([key, title]) => {
    const table = element("table", "", ...report[key].map((part) => shareLine(part, key)));
    return report[key].length ? element("div", `blame-${key}`, element("h2", "", title), table) : null;
  });
  return element("section", "blame-report", element("p", "", report.sentence), element("div", "blame-lists", ...lists));
}

function shareLine({ share, text, group, response, position, note }, key) {
  const numbers = Object.entries({ p: group, r: response, "token ": position }).filter(([, number]) => number >= 0);
  const amount = key === "cancelled" ? numberStyle(Math.abs(share)).signed(share) : `${fixed(100 * share, 1)}%`;
  const place = numbers.map((each) => each.join("")).join(" ");
  return rowOf("", null, ["number", amount], place, element("code", "", text.slice(0, 60)), ["dim", note]);
}

export class ValidationSet {
  /** `openGroup`: index of the prompt whose responses are shown, or null. `onOpen(index)` is told when it changes. */
  constructor({ validation, groups }, openGroup, onOpen) {
    this.groups = groups;
    this.openGroup = openGroup;
    this.onOpen = onOpen;
    this.body = element("tbody");
    this.byGroup = Map.groupBy(validation, (row) => row.group);
    const heads = { Prompt: "", "Best reward": "", "Mean reward": "number" };
    const parts = validation.length
      ? [
          element("p", "dim", "Their gradient is what every score refers to. Click one to read its responses."),
          tableOf("fixed validation-table", heads, this.body),
        ]
      : [element("p", "dim", "The validation set of this step was not stored.")];
    this.node = element("section", "validation", element("h2", "section-title", "Validation prompts"), ...parts);
    this.draw();
  }

  draw() {
    this.body.replaceChildren();
    for (const [index, rows] of this.byGroup) {
      const rewards = rows.map((row) => row.reward);
      const [worst, best] = extent(rewards);
      const isOpen = this.openGroup === index;
      const passed = best > Math.min(worst, 0) ? rewards.filter((reward) => reward === best).length : 0;
      const onclick = () => {
        this.openGroup = isOpen ? null : index;
        this.onOpen(this.openGroup);
        this.draw();
      };
      const node = rowOf(
        `opens${isOpen ? " current" : ""}`,
        { "data-validation": index, onclick },
        ["mono", opener(this.groups[index].text, isOpen)],
        ["", passDots(passed, rewards.length), ` ${fixed(best, 2)}`],
        ["number", fixed(meanOf(rewards), 2)],
      );
      append(this.body, node, isOpen ? validationRow(rows) : null);
    }
  }
}

function validationRow(rows) {
  const lines = rows.map((row) =>
    element("li", "", element("b", "", fixed(row.reward, 2)), element("span", "mono", row.text)),
  );
  return wideRow("opened", 3, element("ul", "validation-responses", ...lines));
}
