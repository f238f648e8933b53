// Tokens under the pointer: hovered, copied, and the selected one with its effect on every response.

import { SCORE_NAMES } from "../channels.js";
import { SIGNED, levelName, levelOf } from "../colours.js";
import { scoreStyle, signWords, withUnit } from "../format.js";
import { readTokens } from "../scores/responses.js";
import { largestSize } from "../statistics.js";
import { visibleText } from "../text.js";
import { readoutParts } from "./dock.js";
import { contrast } from "./pairwise.js";
import { showEffect } from "./rows.js";

const STRONGEST_TINT = 3;
/** Spreads the tints so that the largest effect just reaches the strongest of them. */
const TINT_REACH = 1.67;

export class TokenSelection {
  constructor(sheet, pairwise, dock, rail, continuations) {
    this.continuations = continuations;
    this.sheet = sheet;
    this.group = sheet.group;
    this.pairwise = pairwise;
    this.dock = dock;
    this.rail = rail;
    this.token = null;
    this.tint = null;
  }

  /**
   * Show a token. Resolves to words for the announcer, or null if another token was chosen meanwhile.
   * @param {import("./dock.js").TokenContext} context
   */
  async show(context) {
    const { token, response, position } = context;
    this.unmark();
    this.token = token;
    const row = this.sheet.rowOf(token);
    this.sheet.show(row);
    row.flag(position, "sel", true);
    const effects = await this.effectsOf(context);
    if (this.token !== token) return null;
    this.dock.show(this.group, context, effects, this.sheet.allResponses, this.continuations.node);
    this.continuations.show(response.index, position).catch(this.continuations.on.fail);
    this.makeRoom(this.dock.height);
    if (effects.values) this.tintRows(effects, response);
    this.sheet.reveal(row, position, this.dock.height);
    const value = this.group.values("influence", context.score)?.[token];
    const style = this.group.styleOf("influence", value);
    const score = Number.isFinite(value) ? `, influence ${withUnit(style.signed(value), style)}` : "";
    const text = visibleText(this.group.entry(token), this.group.piece(token));
    return `${text}, ${response.name} position ${position}${score}`;
  }

  unmark() {
    if (this.token === null) return;
    const row = this.sheet.rowOf(this.token);
    row.flag(this.token - row.response.start, "sel", false);
    this.token = null;
  }

  clear() {
    this.unmark();
    this.dock.hide();
    this.makeRoom(0);
    this.tint = null;
    for (const row of this.sheet.rows) row.meta.className = "meta";
  }

  /**
   * @param {import("./dock.js").TokenContext} context
   * @returns {Promise<Record<string, any>>} `values` is null where no effect was stored, and `why` says so.
   */
  async effectsOf({ token, response, position, score: shown }) {
    const { isStored, whyNot, score: name, members } = this.pairwise;
    const values = isStored ? await this.pairwise.ofToken(response.index, position) : null;
    if (!values) return { values: null, why: whyNot };
    const score = this.group.values("influence", name)?.[token];
    if (!Number.isFinite(score)) return { values: null, why: "This token has no score." };
    const { meta } = this.group;
    return {
      members,
      values,
      score,
      unit: meta.unit,
      scoreName: SCORE_NAMES[name],
      sign: signWords(meta, name),
      shownName: shown === name ? "" : SCORE_NAMES[shown],
      sum: contrast(members, values, meta, response.index),
      excludesSelf: Boolean(meta.exclude_self_response),
    };
  }

  /** @param {Record<string, any>} effects */
  tintRows({ members, values }, own) {
    const largest = largestSize(values);
    const style = scoreStyle(this.group.meta.unit, largest);
    this.tint = { classes: [], words: [] };
    for (const row of this.sheet.rows) {
      const { index } = row.response;
      const value = values[members.findIndex((member) => member.response === index)] ?? NaN;
      const level = levelOf(SIGNED, value, largest * TINT_REACH);
      const tint = levelName(SIGNED, Math.sign(level) * Math.min(STRONGEST_TINT, Math.abs(level)));
      row.meta.className = `meta tinted ${tint}`;
      showEffect(row, withUnit(style.signed(value), style), index === own.index);
      this.tint.classes[index] = tint;
      this.tint.words[index] = `influence on it ${withUnit(style.signed(value), style)}`;
    }
  }

  /** Not as a variable of the body: every token would inherit it, and 4,096 of them would be styled again. */
  makeRoom(height) {
    document.body.style.paddingBottom = height ? `calc(var(--foot) + ${height + 24}px)` : "";
    this.rail?.makeRoom(height);
    if (this.group.isChain) this.sheet.node.style.setProperty("--dock", `${height}px`);
  }
}

/** page: the group page. */
export function listenToTokens(page) {
  const { node } = page.sheet;
  const partsOf = (span) => readoutParts(page.group, page.tokenContext(span.token));
  readTokens(
    node,
    page.node,
    (span) => (tokenOf(span) === null ? null : partsOf(span)),
    (span, on) => page.flag(span.token, "hov", on),
  );
  node.addEventListener("pointerdown", (event) => {
    const slot = slotOf(event.target);
    if (slot !== null) node.dataset.selecting = slot; // text of the other column stays out of the selection
  });
  node.addEventListener("click", (event) => {
    const token = tokenOf(event.target);
    if (token === null || !getSelection().isCollapsed) return; // a drag that selected text is not a click
    if (token === page.selection.token) page.clearSelection();
    else page.select(token).catch(page.context.fail);
  });
  document.addEventListener("copy", (event) => copy(page, event), { signal: page.abort.signal });
}

function copy(page, event) {
  const selection = getSelection();
  if (!page.sheet.node.contains(selection.anchorNode)) return;
  const rows = page.sheet.responses.map((response) => page.sheet.rows[response.index]);
  const text = copiedText(page.group, rows, selection);
  if (text === null) return;
  event.clipboardData.setData("text/plain", text);
  event.preventDefault();
}

function tokenOf(node) {
  return node.closest?.(".t")?.token ?? null;
}

/** Raw text of the tokens under a selection, never the glyphs we draw for newlines and special tokens, or null if it
 * holds none. One that spans both columns copies one of them. rows: from top to bottom. */
function copiedText(group, rows, selection) {
  if (selection.isCollapsed) return null;
  const range = selection.getRangeAt(0);
  const slot = slotOf(range.startContainer) ?? slotOf(range.endContainer) ?? 0;
  const built = rows.filter((row) => row.isBuilt && range.intersectsNode(row.slots[slot]));
  const parts = built.map((row) => {
    const covered = row.spans[slot].map((span) => covers(range, span));
    const { start } = row.response;
    return covered.includes(true)
      ? group.rawText(start + covered.indexOf(true), start + covered.lastIndexOf(true) + 1)
      : null;
  });
  const texts = parts.filter((part) => part !== null);
  return texts.length ? texts.join("\n\n") : null;
}

/** Does the range hold at least one character of this span? Touching its edge is not enough. */
function covers(range, span) {
  if (!range.intersectsNode(span)) return false;
  const text = document.createRange();
  const [first, last] = [deepest(span, "firstChild"), deepest(span, "lastChild")];
  text.setStart(first, 0);
  text.setEnd(last, last.nodeType === Node.TEXT_NODE ? last.length : 0);
  return (
    range.compareBoundaryPoints(Range.END_TO_START, text) < 0 &&
    range.compareBoundaryPoints(Range.START_TO_END, text) > 0
  );
}

function deepest(node, side) {
  while (node[side]) node = node[side];
  return node;
}

function slotOf(node) {
  const container = (node.nodeType === Node.ELEMENT_NODE ? node : node.parentElement)?.closest(".tokens");
  return container?.slotIndex ?? null;
}
