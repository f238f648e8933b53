// A prompt by who says what: chat templates put the roles into control tokens and words around them.

import { rawText } from "./token_text.js";

const ROLES = {
  system: "system",
  developer: "system",
  user: "user",
  human: "user",
  assistant: "assistant",
  model: "assistant",
  tool: "tool",
  ipython: "tool",
};
const NAMED = new RegExp(`^\\s*(${Object.keys(ROLES).join("|")})\\s*(?:\\n|$)`, "i");
/** <|user|>, <｜User｜>, [INST]: the control token names the role itself. */
const IN_TOKEN = new RegExp(`^[^A-Za-z]*(${Object.keys(ROLES).join("|")})[^A-Za-z]*$`, "i");
const INSTRUCTION = { "[INST]": "user", "[/INST]": "assistant" };

/**
 * The messages of a prompt, in order; null where no control token says who speaks. Control tokens and the words that
 * name a role are left out.
 * @param {{special: boolean, text: string | null, bytes: any}[]} entries
 * @returns {{role: string, text: string}[] | null}
 */
export function messagesOf(entries) {
  const messages = [];
  let role = null;
  let pending = [];
  /** A role that was named between two control tokens belongs to the text after the second. */
  let named = null;
  const close = () => {
    const text = rawText(pending);
    pending = [];
    const own = NAMED.exec(text);
    if (own && role === null) {
      const rest = text.slice(own[0].length);
      if (rest.trim()) messages.push({ role: ROLES[own[1].toLowerCase()], text: rest.trim() });
      else named = ROLES[own[1].toLowerCase()];
      return;
    }
    if (text.trim()) messages.push({ role: role ?? "text", text: text.trim() });
  };
  for (const entry of entries) {
    if (!entry.special) {
      pending.push(entry);
      continue;
    }
    named = null;
    close();
    const word = entry.text ?? "";
    role = INSTRUCTION[word.trim()] ?? ROLES[IN_TOKEN.exec(word)?.[1]?.toLowerCase()] ?? named;
  }
  named = null;
  close();
  return messages.some(({ role: each }) => each !== "text") ? messages : null;
}
