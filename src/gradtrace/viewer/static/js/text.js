// Token bytes as text: what is shown, the raw text for copying, messages by role, Markdown and LaTeX.

import { append, element } from "./dom.js";

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
  while (pieces.length < entries.length) {
    const start = pieces.length;
    const { text } = entries[start];
    if (text !== null) pieces.push({ text, lead: "", split: false });
    else pieces.push(...splitRun(entries.slice(start, endOfBrokenRun(entries, start))));
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
  const encoder = new TextEncoder();
  const bytes = entries.flatMap((entry) => Array.from(entry.bytes ?? encoder.encode(entry.text)));
  return lenient.decode(Uint8Array.from(bytes));
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

/** A token as it is drawn; its class name is left to the caller, who knows its colour. */
export function tokenSpan(entry, piece) {
  const span = document.createElement("span");
  if (piece.lead && !entry.special) span.append(element("span", "lead", piece.lead), drawnText(entry, piece));
  else span.textContent = drawnText(entry, piece);
  return span;
}

/** A token set apart from the text around it, every character visible. */
export function tokenChip(entry, piece = null) {
  return element("span", "token-chip", visibleText(entry, piece));
}

/** What goes into the span: one line break for any number of newlines, control characters made visible. */
function drawnText(entry, piece) {
  if (/^\n+$/.test(piece.text)) return "\n";
  if (entry.special) return visibleText(entry);
  return piece.text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g,
    (character) => `⟨${character.charCodeAt(0).toString(16)}⟩`,
  );
}

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
  /** A role that was named between two control tokens belongs to the text after the second: it is returned. */
  const close = () => {
    const whole = rawText(pending);
    const own = role === null ? NAMED.exec(whole) : null;
    const named = own && ROLES[own[1].toLowerCase()];
    const text = whole.slice(own?.[0].length ?? 0).trim();
    pending = [];
    if (text) messages.push({ role: role ?? named ?? "text", text });
    return text ? null : named;
  };
  for (const entry of entries) {
    if (!entry.special) {
      pending.push(entry);
      continue;
    }
    const named = close();
    const word = entry.text ?? "";
    role = INSTRUCTION[word.trim()] ?? ROLES[IN_TOKEN.exec(word)?.[1]?.toLowerCase()] ?? named;
  }
  close();
  return messages.some(({ role: each }) => each !== "text") ? messages : null;
}

const GREEK =
  "alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi φ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω";
const SIGNS =
  "cdot · times × div ÷ pm ± mp ∓ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ approx ≈ equiv ≡ sim ∼ propto ∝ infty ∞ sum ∑ prod ∏ int ∫ partial ∂ nabla ∇ in ∈ notin ∉ subset ⊂ subseteq ⊆ cup ∪ cap ∩ emptyset ∅ forall ∀ exists ∃ to → rightarrow → Rightarrow ⇒ implies ⇒ iff ⇔ leftarrow ← mapsto ↦ land ∧ lor ∨ neg ¬ mid ∣ perp ⊥ parallel ∥ angle ∠ triangle △ circ ° deg ° ldots … dots … cdots ⋯ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ langle ⟨ rangle ⟩ sin sin cos cos tan tan log log ln ln exp exp max max min min gcd gcd lcm lcm mod mod bmod mod pmod mod quad   qquad   prime ′ star ⋆ ast ∗ bullet • oplus ⊕ otimes ⊗ therefore ∴ because ∵";
const SYMBOLS = new Map(pairsOf(`${GREEK} ${SIGNS}`));
const AS_IS = ["text", "mathrm", "mathbf", "mathit", "mathbb", "mathcal", "operatorname", "textbf", "textit", "mbox"];
const DROPPED = ["left", "right", "displaystyle", "limits", "big", "Big", "bigl", "bigr"];
const MATH = /\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$([^$\n]+?)\$/g;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|(?<![*\w])\*([^*\s][^*\n]*?)\*(?![*\w])/g;

function pairsOf(text) {
  const words = text.split(" ");
  const pairs = [];
  for (let i = 0; i + 1 < words.length; i += 2) pairs.push([words[i], words[i + 1] || " "]);
  return pairs;
}

/** A text as blocks: code, headings, lines. @returns {Node[]} */
export function richText(text) {
  const blocks = text.split(/^```[^\n]*\n?/m);
  return blocks.flatMap((block, index) => {
    if (index % 2) return [element("pre", "code", block.replace(/\n$/, ""))];
    return block.trim() ? [paragraphs(block)] : [];
  });
}

/** Everything between code blocks. The direction of each line follows its first letter. */
function paragraphs(block) {
  const node = element("div", "rich");
  for (const line of joinedMath(block)
    .replace(/^\n+|\n+$/g, "")
    .split("\n")) {
    const [, marks, words] = /^(#{1,6})\s+(.*)$/.exec(line) ?? [null, "", line];
    const shown = words.replace(/^(\s*)[-*+]\s+/, "$1• ");
    const row = element(marks ? "strong" : "span", "rich-line", ...withMath(shown));
    row.dir = "auto";
    node.append(row);
  }
  return node;
}

/** Formulas over several lines become one line, or their ends would not meet. */
function joinedMath(block) {
  return block.replace(/\$\$[\s\S]+?\$\$|\\\[[\s\S]+?\\\]/g, (math) => math.replaceAll("\n", " "));
}

/** @returns {(Node | string)[]} */
function withMath(text) {
  return split(text, MATH, (match) => {
    const source = match.slice(1).find((part) => part !== undefined);
    return append(element("span", "math"), ...latex(source, true));
  }).flatMap((part) => (typeof part === "string" ? inline(part) : [part]));
}

function inline(text) {
  return split(text, INLINE, ([, code, bold, italic]) => {
    if (code !== undefined) return element("code", "", code);
    const words = latex(bold ?? italic, false);
    return append(element(bold !== undefined ? "strong" : "em"), ...words);
  }).flatMap((part) => (typeof part === "string" ? latex(part, false) : [part]));
}

/** The text around the matches as strings, the matches as what `make` makes of them. */
function split(text, pattern, make) {
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > at) parts.push(text.slice(at, match.index));
    parts.push(make(match));
    at = match.index + match[0].length;
  }
  if (at < text.length) parts.push(text.slice(at));
  return parts;
}

/** LaTeX as symbols, fractions and raised or lowered text. `scripts`: inside a formula, where ^ and _ mean that. */
function latex(source, scripts) {
  /** @type {(Node | string)[]} */
  const nodes = [];
  let at = 0;
  const group = () => {
    while (scripts && source[at] === " ") at += 1;
    if (source[at] !== "{") {
      const command = /^\\[A-Za-z]+/.exec(source.slice(at))?.[0] ?? source[at] ?? "";
      at += command.length;
      return command;
    }
    const start = ++at;
    for (let depth = 1; at < source.length && depth; at++)
      depth += source[at] === "{" ? 1 : source[at] === "}" ? -1 : 0;
    return source.slice(start, source[at - 1] === "}" ? at - 1 : at);
  };
  while (at < source.length) {
    const name = /^\\([A-Za-z]+|.)/.exec(source.slice(at))?.[1];
    if (name !== undefined) {
      at += name.length + 1;
      nodes.push(...command(name, group, scripts));
    } else if (scripts && "^_".includes(source[at])) {
      const tag = source[at++] === "^" ? "sup" : "sub";
      nodes.push(append(element(tag), ...latex(group(), true)));
    } else if (scripts && "{}&".includes(source[at])) at += 1;
    else nodes.push(source[at++]);
  }
  return nodes;
}

/** @returns {(Node | string)[]} */
function command(name, group, scripts) {
  if (SYMBOLS.has(name)) return [SYMBOLS.get(name)];
  if (["frac", "dfrac", "tfrac", "binom"].includes(name)) {
    const [above, below] = [latex(group(), true), latex(group(), true)];
    const join = name === "binom" ? " over " : "⁄";
    return [element("span", "fraction", ...bracketed(above), join, ...bracketed(below))];
  }
  if (name === "sqrt") return ["√", ...bracketed(latex(group(), true))];
  if (name === "boxed") {
    const content = latex(group(), true);
    return content.length ? [element("span", "boxed", ...content)] : ["\\boxed{}"];
  }
  if (AS_IS.includes(name)) return latex(group(), scripts);
  if (DROPPED.includes(name)) return [];
  if (name === "\\") return [" "];
  if (/^[{}%$#&_]$/.test(name)) return [name];
  if (/^[,;:! ]$/.test(name)) return [" "];
  return [`\\${name}`];
}

/** Parentheses around more than one thing. */
function bracketed(nodes) {
  return nodes.length > 1 && !nodes.every((node) => typeof node === "string" && /^[\w.]$/.test(node))
    ? ["(", ...nodes, ")"]
    : nodes;
}
