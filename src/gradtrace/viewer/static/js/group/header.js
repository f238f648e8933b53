// The head of the group page: the prompt, the facts, and why something is missing.

import { button, element, emptyState, fact, linkTo, passDots } from "../dom.js";
import { fixed, numberStyle } from "../format.js";
import { meanOf } from "../scales.js";
import { rawText } from "../token_text.js";
import { promptBody } from "./prompt.js";

const LONGEST_ANSWER = 24;

/** The finding that the page begins with, and a way to the token that it is about. */
export function storyLine(group, onShow) {
  const { sentence, at } = group.structure.story;
  const node = element("p", "story", sentence, " ");
  if (at) node.append(button("link-button", "show it", () => onShow(group.responses[at[0]].start + at[1])));
  return node;
}

/** historyHref: where this prompt is followed over time; null where that cannot be asked. */
export function promptSection(group, credit, historyHref) {
  const { step, group: index } = group.structure;
  const left = element("div", "", element("h1", "caption", `Prompt, group ${index} of step ${step}`));
  const links = element("p", "prompt-links");
  promptBody(group, left, links);
  if (historyHref) links.append(linkTo(historyHref, "link-button", "this prompt over time"));
  left.append(links);
  return element("section", "prompt", left, factsOf(group, credit));
}

function factsOf(group, credit) {
  const facts = element("div", "facts");
  const add = (value, label) => facts.append(fact(value, label));
  const { responses } = group;
  const accepted = responses.filter((response) => response.accepted).length;
  const passed = element("span", "", `${accepted}/${responses.length}\u2002`, passDots(accepted, responses.length));
  if (group.mixed) add(passed, "accepted");
  else if (responses.length) add(fixed(responses[0].reward, 2), `reward of all ${responses.length}`);
  const answer = rawText(group.expected.filter((entry) => !entry.special));
  if (answer && answer.length <= LONGEST_ANSWER && !group.isChain)
    add(element("span", "mono", answer), "expected answer");
  const entropy = group.values("entropy");
  if (entropy) add(fixed(meanOf(entropy), 3), "mean entropy, nats");
  const influence = group.values("influence", credit);
  const size = influence ? meanOf(influence.map(Math.abs)) * influence.filter(Number.isFinite).length : NaN;
  if (group.credits.length) add(numberStyle(size).plain(size), "Σ |influence|, response tokens");
  add(fixed(meanOf(responses.map((response) => response.length)), 1).replace(/\.0$/, ""), "mean length");
  return facts;
}

const WHY_NOT_SCORED = {
  over_prompt_cap: "the step had more mixed groups than trainer.influence_trace.max_prompts_per_step.",
  non_finite: "gradients or scores of this group were not finite (NaN or infinity).",
  not_captured: "the hooks saw none of this group's tokens. `gradtrace doctor` checks the gradient flow.",
};

/** Why this group has no influence, in words; null if it has. */
export function whyNoInfluence(group) {
  const { status, group: index, has_influence: traced, has_entropy: hasEntropy } = group.structure;
  if (group.credits.length) return null;
  const rest = hasEntropy ? " Entropy and log-probs are still shown." : "";
  const count = group.responses.length;
  let why = WHY_NOT_SCORED[status];
  if (status === "constant_reward" || (!group.mixed && count > 1))
    why = `all ${count || ""} rewards are equal, so there is nothing to contrast.`;
  else if (count === 1) why = "one response alone has nothing to be contrasted with.";
  else if (status === "not_asked")
    why = `\`gradtrace attribute\` was asked for other groups; --group ${index} adds this one.`;
  if (why) return `No influence here: ${why}${rest}`;
  if (!traced)
    return `No influence trace of this step: trainer.influence_trace.enable is off, or this step was not a multiple of its write_every.${rest}`;
  return `No influence scores were stored for this group.${rest}`;
}

export const SELECTION_REMARKS = {
  cut_at_token_cap: "traced up to max_tokens_per_response",
  non_finite: "gradient not finite",
  not_captured: "not captured",
};

export function responsesNotStored() {
  return emptyState(
    "h2",
    "The responses of this group were not stored",
    "An influence trace holds only the responses of scored groups. With trainer.entropy_trace.enable=true every response is there.",
  );
}
