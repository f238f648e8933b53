// One token selected: what it does to every response. The dock shows it, meta cells and rail take its tint; the
// colours of the tokens never change.

import { CREDIT_NAMES } from "../channels.js";
import { numberStyle } from "../format.js";
import { signWords } from "../meaning.js";
import { signedClass, signedClassName } from "../scales.js";
import { visibleText } from "../token_text.js";
import { showEffect } from "./meta_cell.js";
import { contrast } from "./pairwise.js";

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

  /** Show a token. Resolves to words for the announcer, or null if another token was chosen meanwhile. */
  async show(token, context) {
    this.unmark();
    this.token = token;
    const { response } = context;
    const position = token - response.start;
    const row = this.sheet.rowOf(token);
    this.sheet.show(row);
    row.flag(position, "sel", true);
    const effects = await this.effectsOf(token, context);
    if (this.token !== token) return null;
    this.dock.show(this.group, token, context, effects, this.sheet.allResponses, this.continuations.node);
    this.continuations.show(response.index, position).catch(this.continuations.on.fail);
    this.makeRoom(this.dock.height);
    if (effects.values) this.tintRows(effects, response);
    this.sheet.reveal(row, position, this.dock.height);
    const value = this.group.values("influence", context.credit)?.[token];
    const score = Number.isFinite(value) ? `, influence ${numberStyle(Math.abs(value)).signed(value)}` : "";
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

  /** @returns {Promise<Record<string, any>>} `values` is null where no effect was stored, and `why` says so. */
  async effectsOf(token, { response, credit: shown }) {
    if (!this.pairwise.isStored) return { values: null, why: this.pairwise.whyNot };
    const values = await this.pairwise.ofToken(response.index, token - response.start);
    if (!values) return { values: null, why: this.pairwise.whyNot };
    const { credit } = this.pairwise;
    const score = this.group.values("influence", credit)[token];
    if (!Number.isFinite(score)) return { values: null, why: "This token's gradient was not captured." };
    const { members } = this.pairwise;
    const { meta } = this.group;
    return {
      members,
      values,
      score,
      creditName: CREDIT_NAMES[credit],
      sign: signWords(meta, credit),
      shownName: shown === credit ? "" : CREDIT_NAMES[shown],
      sum: contrast(members, values, meta, response.index),
      excludesSelf: Boolean(meta.exclude_self_response),
    };
  }

  /** @param {Record<string, any>} effects */
  tintRows({ members, values }, own) {
    const largest = Math.max(...Array.from(values).filter(Number.isFinite).map(Math.abs));
    const style = numberStyle(largest);
    this.tint = { classes: [], words: [] };
    for (const row of this.sheet.rows) {
      const { index } = row.response;
      const column = members.findIndex((member) => member.response === index);
      const value = column >= 0 ? values[column] : NaN;
      const level = Number.isFinite(value) ? signedClass(value, largest * TINT_REACH) : 0;
      const tint = signedClassName(Math.sign(level) * Math.min(STRONGEST_TINT, Math.abs(level)));
      row.meta.className = `meta tinted ${tint}`;
      showEffect(row, style.signed(value), index === own.index);
      this.tint.classes[index] = tint;
      this.tint.words[index] = `influence on it ${style.signed(value)}`;
    }
  }

  /** Not as a variable of the body: every token would inherit it, and 4,096 of them would be styled again. */
  makeRoom(height) {
    document.body.style.paddingBottom = height ? `calc(var(--foot) + ${height + 24}px)` : "";
    this.rail?.makeRoom(height);
    if (this.group.isChain) this.sheet.node.style.setProperty("--dock", `${height}px`);
  }
}
