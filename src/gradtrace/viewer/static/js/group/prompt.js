// The prompt of a group: by role and readable, the user's words first, with its tokens as they are on demand.

import { messagesOf } from "../chat_roles.js";
import { append, button, element } from "../dom.js";
import { plural } from "../format.js";
import { richText } from "../rich_text.js";
import { appendTokens, rawText } from "../token_text.js";

const LONG_PROMPT = 600;

/** Put the prompt into `node`, and the ways to its other forms into `links`. */
export function promptBody(group, node, links) {
  const raw = rawPrompt(group);
  const readable = group.isChain ? null : readablePrompt(group.prompt);
  const shown = readable ?? raw;
  node.append(shown);
  if (shown.textContent.length > LONG_PROMPT) links.append(foldButton(shown), " ");
  if (!readable) return;
  raw.hidden = true;
  node.append(raw);
  const toggle = button("link-button", "raw", () => {
    raw.hidden = !raw.hidden;
    readable.hidden = !raw.hidden;
    toggle.textContent = raw.hidden ? "raw" : "readable";
  });
  links.append(toggle, " ");
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
