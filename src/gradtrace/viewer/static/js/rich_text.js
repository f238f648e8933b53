// Markdown and LaTeX as people read them: nodes with text in them, never parsed as HTML. What is not understood stays
// as it is written; the tokens beside it are the raw text.

import { append, element } from "./dom.js";

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
export function latex(source, scripts) {
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
