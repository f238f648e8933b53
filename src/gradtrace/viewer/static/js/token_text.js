// Tokens are bytes. Here they become what is shown, and, for copying, the raw text again.

import { element } from "./dom.js";

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const lenient = new TextDecoder("utf-8", { ignoreBOM: true });

/** The vocabulary of an answer: {ids, bytes: hex or null each, special: indices} → one entry per index. */
export function readVocabulary({ ids, bytes, special }) {
  const entries = ids.map((id, index) => ({
    id,
    bytes: bytes[index] === null ? null : fromHex(bytes[index]),
    special: false,
  }));
  for (const index of special) entries[index].special = true;
  for (const entry of entries) entry.text = entry.bytes === null ? `⟨${entry.id}⟩` : decodeOrNull(entry.bytes);
  return entries;
}

function fromHex(hex) {
  const bytes = new Uint8Array(hex.length / 2);
  for (let i = 0; i < bytes.length; i++) bytes[i] = Number.parseInt(hex.slice(2 * i, 2 * i + 2), 16);
  return bytes;
}

export function hexOf(bytes) {
  return bytes === null ? "unknown" : Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ");
}

function decodeOrNull(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    return null;
  }
}

/**
 * What to show for each token of a sequence: {text, lead, split}. Byte-level vocabularies cut characters in two:
 * a character is shown on the token that holds its first byte, and the other tokens show their bytes as `lead`.
 */
export function piecesOf(entries) {
  const pieces = [];
  for (let i = 0; i < entries.length; ) {
    if (entries[i].text !== null) {
      pieces.push({ text: entries[i].text, lead: "", split: false });
      i += 1;
      continue;
    }
    const end = endOfBrokenRun(entries, i);
    pieces.push(...splitRun(entries.slice(i, end)));
    i = end;
  }
  return pieces;
}

/** Tokens i…end that make whole characters only together; one token if nothing helps. */
function endOfBrokenRun(entries, start) {
  let bytes = [];
  for (let end = start; end < Math.min(entries.length, start + 8); end++) {
    if (entries[end].bytes === null || entries[end].special) break;
    bytes = [...bytes, ...entries[end].bytes];
    if (decodeOrNull(Uint8Array.from(bytes)) !== null) return end + 1;
  }
  return start + 1;
}

function splitRun(run) {
  if (run.length === 1) return [{ text: "", lead: `⟨${hexOf(run[0].bytes).replaceAll(" ", "")}⟩`, split: true }];
  const pieces = run.map(() => ({ text: "", lead: "", split: true }));
  const owner = run.flatMap((entry, index) => Array.from(entry.bytes, () => index));
  const bytes = run.flatMap((entry) => Array.from(entry.bytes));
  let at = 0;
  for (const character of strict.decode(Uint8Array.from(bytes))) {
    const size = new TextEncoder().encode(character).length;
    pieces[owner[at]].text += character;
    for (let k = at + 1; k < at + size; k++) {
      if (owner[k] !== owner[at]) pieces[owner[k]].lead += bytes[k].toString(16).padStart(2, "0");
    }
    at += size;
  }
  return pieces;
}

/** The text that these tokens stand for, exactly: for the clipboard. */
export function rawText(entries) {
  const parts = [];
  let pending = [];
  const flush = () => {
    if (pending.length) parts.push(lenient.decode(Uint8Array.from(pending)));
    pending = [];
  };
  for (const entry of entries) {
    if (entry.bytes === null) {
      flush();
      parts.push(entry.text);
    } else for (const byte of entry.bytes) pending.push(byte);
  }
  flush();
  return parts.join("");
}

/** Put tokens into a node as they are, control tokens set apart. */
export function appendTokens(node, entries) {
  const pieces = piecesOf(entries);
  for (const [position, entry] of entries.entries()) {
    if (entry.special) node.append(element("span", "special", visibleText(entry)), " ");
    else node.append(pieces[position].lead.startsWith("⟨") ? pieces[position].lead : pieces[position].text);
  }
  return node;
}

/** One line with every character visible, for chips and tables. */
export function visibleText(entry, piece = null) {
  const text = piece ? piece.lead + piece.text : entry.text;
  if (text === null) return `⟨${hexOf(entry.bytes)}⟩`;
  if (text === "") return "∅";
  return text
    .replaceAll("\n", "↵")
    .replaceAll("\t", "⇥")
    .replaceAll("\r", "␍")
    .replaceAll(" ", "·")
    .replace(/[\u0000-\u001f\u007f]/g, (character) => `⟨${character.charCodeAt(0).toString(16).padStart(2, "0")}⟩`);
}

/** Letters of the token's class name that say how to draw it; see group.css. */
export function drawingClass(entry, piece) {
  if (entry.special) return "t x";
  if (/^\n+$/.test(piece.text)) return piece.text.length > 1 ? "t nl nl2" : "t nl";
  if (piece.split) return "t hex";
  return piece.text.startsWith(" ") ? "t sp" : "t";
}

/** What goes into the span: one line break for any number of newlines, control characters made visible. */
export function drawnText(entry, piece) {
  if (/^\n+$/.test(piece.text)) return "\n";
  if (entry.special) return visibleText(entry);
  return piece.text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g,
    (character) => `⟨${character.charCodeAt(0).toString(16)}⟩`,
  );
}
