// A table of responses, of which one can be open with its whole text as coloured tokens.

import { levelName, levelOf } from "../colours.js";
import { opener } from "../controls.js";
import { acceptedMark, element, markCurrent, readoutItem, rowOf, wideRow } from "../dom.js";
import { count, fixed, numberStyle, sharedStart } from "../format.js";
import { neighbourIn } from "../pages/page.js";
import { appendTokens, drawingClass, piecesOf, readVocabulary, tokenChip, tokenSpan } from "../text.js";

const MOST_ROWS = 60;

/** Leave out what all prompts have in common. */
export function cutPrompts(groups) {
  const cut = sharedStart(groups.map((group) => group.text));
  for (const group of groups) group.text = group.text.slice(cut);
}

export class ResponseList {
  /**
   * cells(row): the cells after prompt, text and reward. opened(row, whole): what an open response shows.
   * @param {{url: any, groups: {text: string}[], texts: ResponseTexts, width: number,
   *   cells: (row: any) => import("../dom.js").Cell[], opened: (row: any, whole: any) => Node[]}} settings
   */
  constructor({ url, groups, texts, width, cells, opened }) {
    this.url = url;
    this.groups = groups;
    this.texts = texts;
    this.width = width;
    this.cells = cells;
    this.opened = opened;
    this.selected = url.number("sel");
    /** The response that j and k have reached. */
    this.cursor = null;
    /** @type {any[]} */
    this.rows = [];
    /** Those of them that are drawn, by their response. */
    this.nodes = new Map();
    this.node = element("tbody");
    cutPrompts(groups);
  }

  draw(rows = this.rows) {
    this.rows = rows;
    const visible = rows.filter((row, index) => index < MOST_ROWS || row.response === this.selected);
    this.nodes = new Map(visible.map((row) => [row.response, this.row(row)]));
    this.node.replaceChildren(...this.nodes.values());
    const picked = visible.find((row) => row.response === this.selected);
    if (picked) this.nodes.get(picked.response).after(this.openRow(picked));
    const hidden = rows.length - visible.length;
    if (hidden > 0) this.node.append(wideRow("between", this.width, `${count(hidden)} more`));
    if (!rows.length) this.node.append(wideRow("dim", this.width, "No such response."));
  }

  row(row) {
    const isOpen = row.response === this.selected;
    const mark = row.accepted === null ? null : acceptedMark(row.accepted);
    return rowOf(
      `opens${isOpen ? " current" : ""}`,
      { "data-response": row.response, onclick: () => this.select(isOpen ? null : row.response) },
      ["c-prompt mono", this.groups[row.group].text],
      ["c-text mono", mark, " ", opener(row.text, isOpen)],
      ["number", fixed(row.reward, 2)],
      ...this.cells(row),
    );
  }

  openRow(row) {
    const node = wideRow("opened", this.width, element("p", "dim", "Loading …"));
    const cell = node.children[0];
    this.texts
      .get(row.response)
      .then((whole) => cell.replaceChildren(...this.opened(row, whole)))
      .catch((error) => cell.replaceChildren(element("p", "dim", `${error.message} Its beginning: ${row.text}`)));
    return node;
  }

  select(response) {
    this.selected = response;
    this.url.update({ sel: response });
    this.draw();
    markCurrent(this.nodes.values(), this.nodes.get(response));
  }

  move(direction) {
    this.cursor = neighbourIn([...this.nodes.keys()], this.cursor, direction) ?? null;
    markCurrent(this.nodes.values(), this.nodes.get(this.cursor));
  }

  /** Keys that every such list has. */
  get actions() {
    return {
      j: () => this.move(1),
      k: () => this.move(-1),
      Enter: () => this.cursor !== null && this.select(this.cursor === this.selected ? null : this.cursor),
    };
  }
}

/** @typedef {{title: string, unit: string, ramp?: string, signed?: boolean}} TokenColumn */

/** @type {Record<string, TokenColumn>} */
const TOKEN_COLUMNS = {
  entropy: { title: "entropy", ramp: "e", unit: "nats" },
  log_prob: { title: "log-prob", ramp: "l", unit: "nats" },
  token_share: { title: "share", signed: true, unit: "nats per token of E" },
  entropy_change: { title: "predicted change", signed: true, unit: "nats" },
  entropy_change_measured: { title: "measured change", signed: true, unit: "nats" },
};

/** The responses of a page's step, each fetched once. */
export class ResponseTexts {
  /** described: the token columns of an instrument, beyond those that are known here. */
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
    const look = this.described[channel];
    const label = look ? `tokens coloured by ${look.title}` : "tokens";
    const spans = this.entries.map((entry, position) => {
      const colour = look ? levelName(look, levelOf(look, this.channels[channel]?.[position], top)) : "";
      const span = tokenSpan(entry, this.pieces[position]);
      span.className = `${drawingClass(entry, this.pieces[position])}${colour ? ` ${colour}` : ""}`;
      return Object.assign(span, { readout: () => this.describe(position) });
    });
    const words = { role: "group", "aria-label": label, "data-channel": channel };
    return element("div", "prose", element("div", "tokens", words, ...spans));
  }

  /** Parts of the line at the bottom of the window. */
  describe(position) {
    const items = Object.entries(this.channels).map(([name, values]) => {
      const [column, value] = [this.described[name], values[position]];
      if (!column || value === null) return null;
      const style = numberStyle(Math.abs(value));
      const text = `${column.signed ? style.signed(value) : style.plain(value)} ${column.unit}`;
      return readoutItem({ name: column.title, text });
    });
    const chip = tokenChip(this.entries[position], this.pieces[position]);
    return [chip, element("span", "", `position ${position}`), ...items.filter((item) => item !== null)];
  }
}

/**
 * The line at the bottom of the window: what is known of the token under the pointer, among those under `root`.
 * partsOf(span): its parts, or null where there is nothing to say; mark(span, on): show which token it is.
 */
export function readTokens(
  root,
  page = root,
  partsOf = (span) => span.readout?.() ?? null,
  mark = (span, on) => span.classList.toggle("hov", on),
) {
  const line = element("div", "readout", { role: "tooltip", hidden: true });
  let hovered = null;
  const show = (span) => {
    if (hovered) mark(hovered, false);
    const parts = span && partsOf(span);
    hovered = parts ? span : null;
    line.hidden = !parts;
    if (!parts) return;
    mark(span, true);
    line.replaceChildren(...parts);
  };
  root.addEventListener("pointerover", (event) => show(event.target.closest?.(".t")));
  root.addEventListener("pointerleave", () => show(null));
  page.append(line);
}
