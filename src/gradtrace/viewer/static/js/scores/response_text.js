// A response as coloured tokens, outside of the group page: fetched when it is opened, any channel, one or two maps.

import { element, readoutItem } from "../dom.js";
import { numberStyle } from "../format.js";
import { signedClass, signedClassName, unsignedClass, unsignedClassName } from "../scales.js";
import { appendTokens, drawingClass, drawnText, piecesOf, readVocabulary, visibleText } from "../token_text.js";

/**
 * What a channel is called, and whether its colours have a sign.
 * @type {Record<string, {title: string, unit: string, ramp?: string, signed?: boolean}>}
 */
const TOKEN_COLUMNS = {
  entropy: { title: "entropy", ramp: "e", unit: "nats" },
  log_prob: { title: "log-prob", ramp: "l", unit: "nats" },
  token_share: { title: "share", signed: true, unit: "nats per token of E" },
  entropy_change: { title: "predicted change", signed: true, unit: "nats" },
  entropy_change_measured: { title: "measured change", signed: true, unit: "nats" },
};

/** The responses of a page's step, each fetched once. */
export class ResponseTexts {
  /** described: what the token columns of an instrument are called, beyond those that are known here. */
  constructor(source, path, described = {}) {
    this.source = source;
    this.path = path;
    this.described = { ...TOKEN_COLUMNS, ...described };
    this.texts = new Map();
  }

  /** hidden: channels that mean nothing for it. */
  async get(response, hidden = []) {
    if (!this.texts.has(response)) {
      const structure = await this.source.json(`${this.path}/responses/${response}`);
      this.texts.set(response, new ResponseText(structure, hidden, this.described));
    }
    return this.texts.get(response);
  }
}

class ResponseText {
  /** structure: answer of …/responses/N. */
  constructor(structure, hidden, described) {
    this.described = described;
    const vocabulary = readVocabulary(structure.vocabulary);
    this.channels = Object.fromEntries(Object.entries(structure.channels).filter(([name]) => !hidden.includes(name)));
    this.prompt = structure.prompt.map((index) => vocabulary[index]);
    this.entries = structure.tokens.map((index) => vocabulary[index]);
    this.pieces = piecesOf(this.entries);
  }

  promptNode() {
    return appendTokens(element("div", "whole-prompt"), this.prompt);
  }

  /** The tokens coloured by a channel; without one, plain. */
  map(channel, top) {
    const node = element("div", "tokens", {
      role: "group",
      "aria-label": channel ? `tokens coloured by ${this.described[channel].title}` : "tokens",
      "data-channel": channel,
    });
    for (const [position, entry] of this.entries.entries()) {
      const piece = this.pieces[position];
      const colour = channel ? colourOf(this.described[channel], this.channels[channel]?.[position], top) : "";
      const span = element("span", `${drawingClass(entry, piece)}${colour ? ` ${colour}` : ""}`);
      if (piece.lead && !entry.special) span.append(element("span", "lead", piece.lead));
      span.append(drawnText(entry, piece));
      node.append(Object.assign(span, { readout: () => this.describe(position) }));
    }
    return element("div", "prose", node);
  }

  /** Parts of the line at the bottom of the window. */
  describe(position) {
    const entry = this.entries[position];
    const parts = [
      element("span", "token-chip", visibleText(entry, this.pieces[position])),
      element("span", "", `position ${position}`),
    ];
    for (const [name, values] of Object.entries(this.channels)) {
      const column = this.described[name];
      const value = values[position];
      if (!column || value === null) continue;
      const style = numberStyle(Math.abs(value));
      const text = `${column.signed ? style.signed(value) : style.plain(value)} ${column.unit}`;
      parts.push(readoutItem({ name: column.title, text }));
    }
    return parts;
  }
}

function colourOf({ signed, ramp = "e" }, value, top) {
  if (!(top > 0) || typeof value !== "number") return "";
  return signed ? signedClassName(signedClass(value, top)) : unsignedClassName(ramp, unsignedClass(value, top));
}

/** The readout at the foot of the window, for every token under `root`. */
export function readTokens(root) {
  const node = element("div", "readout", { role: "tooltip", hidden: true });
  root.append(node);
  let hovered = null;
  root.addEventListener("pointerover", (event) => {
    const span = event.target.closest?.(".t");
    hovered?.classList.remove("hov");
    hovered = span?.readout ? span : null;
    node.hidden = hovered === null;
    if (hovered === null) return;
    hovered.classList.add("hov");
    node.replaceChildren(...hovered.readout());
  });
  root.addEventListener("pointerleave", () => {
    hovered?.classList.remove("hov");
    hovered = null;
    node.hidden = true;
  });
}
