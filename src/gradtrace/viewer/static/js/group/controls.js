// The controls above a group: how it is laid out, scaled and ordered, and which of its scores is shown.

import { CREDIT_HINT, CREDIT_NAMES } from "../channels.js";
import { segmentedControl } from "../controls.js";
import { stepIsLikelier } from "../meaning.js";
import { ORDERS } from "./sheet.js";

export const VIEWS = { side: "side by side", stack: "stacked", one: "one", read: "reading" };
export const SCALES = ["response", "group", "step"];
/** Two questions about a token: what its step does in training, and what a step that makes it likelier would do. */
export const QUESTIONS = { training: "training on a token does", likelier: "making it likelier would do" };

/** now: {view, scale, by, credit, asks, order, units}; choose(name, value) is told a new value of one of them. */
export function groupControls(group, now, choose) {
  const has = (credit) => group.credits.includes(credit);
  const whyNot = (credit) =>
    `this group has no ${CREDIT_NAMES[credit]} credit (trainer.influence_trace.credit, .loss_term_prompts)`;
  const credits = ["loss_term", has("tail") ? "tail" : "position"]; // one of the two comes with the backward pass
  const make = (name, label, options, hint = "") =>
    segmentedControl({ label, value: now[name], options, onChange: (value) => choose(name, value), hint });
  const controls = {
    view: make("view", "View", VIEWS),
    scale: make("scale", "Colour scale, 99th pct. of", SCALES),
    by: make(
      "by",
      "By",
      now.units,
      "Influence and ΔV of a sentence, a line or a turn are the sums over its tokens; entropy and log-prob are the means.",
    ),
    credit: make(
      "credit",
      "Credit",
      credits.map((value) => ({
        value,
        label: CREDIT_NAMES[value],
        disabled: !has(value),
        why: has(value) ? "" : whyNot(value),
      })),
      CREDIT_HINT,
    ),
    asks: make("asks", "What", QUESTIONS),
    order: make(
      "order",
      "Order",
      ORDERS.map((value) => ({ value, label: value, disabled: value === "influence" && !group.credits.length })),
    ),
  };
  controls.credit.hidden = !group.credits.length;
  controls.asks.hidden = !group.structure.likelier || stepIsLikelier(group.meta);
  return controls;
}
