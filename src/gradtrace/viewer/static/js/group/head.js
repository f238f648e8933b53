// The head of the group page: the prompt, the facts, and why something is missing.

import { append, button, element, emptyState, factList, linkTo, passDots } from "../dom.js";
import { fixed, plural } from "../format.js";
import { meanOf } from "../statistics.js";
import { appendTokens, messagesOf, rawText, richText } from "../text.js";
import { sumOver } from "./model.js";

const LONGEST_ANSWER = 24;

/** The finding that the page begins with, and a way to the token that it is about. */
export function storyLine(group, onShow) {
  const { sentence, at } = group.structure.story;
  const node = element("p", "story", sentence, " ");
  if (at) node.append(button("link-button", "show it", () => onShow(group.responses[at[0]].start + at[1])));
  return node;
}

/** What the optimizer step did to the group's objective, and what a reader of its scores must know; null where nothing
 * is to be said. */
export function booksLines(group, onShow) {
  const { books, remarks } = group.structure;
  const line = books && element("p", "books", books.sentence, " ");
  if (books?.at) {
    const [response, position] = books.at;
    line.append(button("link-button", "show it", () => onShow(group.responses[response].start + position)));
  }
  return [line, ...remarks.map((remark) => element("p", "notice", remark))].filter(Boolean);
}

/** historyHref: where this prompt is followed over time; null where that cannot be asked. */
export function promptSection(group, score, historyHref) {
  const { step, group: index } = group.structure;
  const { shown, links } = promptBody(group);
  const history = historyHref ? linkTo(historyHref, "link-button", "this prompt over time") : null;
  const caption = element("h1", "caption", `Prompt, group ${index} of step ${step}`);
  const left = element("div", "", caption, ...shown, element("p", "prompt-links", ...links, history));
  return element("section", "prompt", left, factsOf(group, score));
}

function factsOf(group, score) {
  const { responses } = group;
  const accepted = responses.filter((response) => response.accepted).length;
  const passed = element("span", "", `${accepted}/${responses.length}\u2002`, passDots(accepted, responses.length));
  const answer = rawText(group.expected.filter((entry) => !entry.special));
  const isShown = answer && answer.length <= LONGEST_ANSWER && !group.isChain;
  const entropy = group.values("entropy");
  const sum = sumOver(group.values("influence", score) ?? [], { start: 0, end: group.size });
  const style = group.styleOf("influence", sum);
  const length = fixed(meanOf(responses.map((response) => response.length)), 1).replace(/\.0$/, "");
  return factList(
    group.mixed ? [passed, "accepted"] : null,
    group.mixed || !responses.length ? null : [fixed(responses[0].reward, 2), `reward of all ${responses.length}`],
    isShown ? [element("span", "mono", answer), "expected answer"] : null,
    entropy ? [fixed(meanOf(entropy), 3), "mean entropy, nats"] : null,
    group.scores.length ? [style.signed(sum), `Σ influence${style.unit ? `, ${style.unit}` : ""}`] : null,
    [length, "mean length"],
  );
}

const WHY_NOT_SCORED = {
  over_prompt_cap: "the step had more mixed groups than trainer.influence_trace.max_prompts_per_step.",
  non_finite: "gradients or scores of this group were not finite (NaN or infinity).",
  not_captured: "the hooks saw none of this group's tokens. `gradtrace doctor` checks the gradient flow.",
};

/** Why this group has no influence, in words; null if it has. */
export function whyNoInfluence(group) {
  const { status, group: index, has_influence: traced, has_entropy: hasEntropy } = group.structure;
  if (group.scores.length) return null;
  const rest = hasEntropy ? " Entropy and log-probs are still shown." : "";
  const count = group.responses.length;
  const why = () => {
    if (status === "constant_reward" || (!group.mixed && count > 1))
      return `all ${count || ""} rewards are equal, so there is nothing to contrast.`;
    if (count === 1) return "one response alone has nothing to be contrasted with.";
    if (status === "not_asked")
      return `\`gradtrace attribute\` was asked for other groups; --group ${index} adds this one.`;
    return WHY_NOT_SCORED[status];
  };
  if (why()) return `No influence here: ${why()}${rest}`;
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

const LONG_PROMPT = 600;

/** The prompt, readable and raw, and the ways from one form to another. */
function promptBody(group) {
  const raw = rawPrompt(group);
  const readable = group.isChain ? null : readablePrompt(group.prompt);
  const whole = readable ?? raw;
  const links = whole.textContent.length > LONG_PROMPT ? [foldButton(whole), " "] : [];
  if (!readable) return { shown: [raw], links };
  raw.hidden = true;
  const toggle = button("link-button", "raw", () => {
    raw.hidden = !raw.hidden;
    readable.hidden = !raw.hidden;
    toggle.textContent = raw.hidden ? "raw" : "readable";
  });
  return { shown: [readable, raw], links: [...links, toggle, " "] };
}

/** Its tokens as they are, control tokens included. */
function rawPrompt(group) {
  const text = appendTokens(element("div", `text${group.isChain ? " chain-prompt" : ""}`), group.prompt);
  text.addEventListener("copy", (event) => {
    if (String(getSelection()).trim() !== text.textContent.trim()) return; // a part: the browser's own text is right
    event.clipboardData.setData("text/plain", rawText(group.prompt));
    event.preventDefault();
  });
  return text;
}

/** What user and assistant said, in order; instructions of the system and of tools are folded below. */
function readablePrompt(entries) {
  const messages = messagesOf(entries);
  const node = element("div", "text readable");
  if (messages === null) return append(node, ...richText(rawText(entries.filter((entry) => !entry.special))));
  const isTalk = ({ role }) => role === "user" || role === "assistant";
  const talk = messages.filter(isTalk);
  for (const { role, text } of talk) {
    const author = talk.length > 1 ? element("span", "author", role) : null;
    node.append(element("div", `message ${role}`, author, ...richText(text)));
  }
  for (const { role, text } of messages.filter((message) => !isTalk(message))) {
    const words = plural(text.split(/\s+/).length, "word");
    node.append(element("details", "message", element("summary", "", `${role}, ${words}`), ...richText(text)));
  }
  return node;
}

function foldButton(text) {
  text.classList.add("folded");
  const unfold = button("link-button", "show the whole prompt", () => {
    const folded = text.classList.toggle("folded");
    unfold.textContent = folded ? "show the whole prompt" : "fold the prompt";
  });
  return unfold;
}
