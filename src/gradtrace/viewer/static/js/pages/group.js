// The group page: a prompt and its responses as token heat maps, and what one token does to every response.

import { CHANNELS } from "../channels.js";
import { nextOf } from "../controls.js";
import { element } from "../dom.js";
import { numberStyle } from "../format.js";
import { LIKELIER, scoreSentence, signWords, unitWords } from "../meaning.js";
import { neighbourIn, Page } from "../page.js";
import { scaleTop } from "../scales.js";
import { colouring, largestTop } from "../group/colouring.js";
import { groupControls, QUESTIONS, SCALES, VIEWS } from "../group/controls.js";
import { Continuations } from "../group/continuations.js";
import { Counterfactual } from "../group/counterfactual.js";
import { DiffPanel } from "../group/diff.js";
import { Dock } from "../group/dock.js";
import { FindBar } from "../group/find_bar.js";
import { promptSection, responsesNotStored, storyLine, whyNoInfluence } from "../group/header.js";
import { showCurve, showSums } from "../group/meta_cell.js";
import { Group, sumOver } from "../group/model.js";
import { PairwiseInfluence } from "../group/pairwise.js";
import { listenToTokens } from "../group/pointing.js";
import { Rail } from "../group/rail.js";
import { Readout } from "../group/readout.js";
import { TokenSelection } from "../group/selection.js";
import { fitsSideBySide, ORDERS, Sheet } from "../group/sheet.js";
import { showTurns } from "../group/turns.js";
import { UNITS, unitMetrics } from "../group/units.js";

const NARROW = 1100;
/** Below this width text comes first and controls are folded. */
const SMALL = 720;
const HINTS = {
  "j k": "response",
  "h l": "group",
  "[ ]": "step",
  v: "view",
  s: "scale",
  b: "by token, sentence, line, turn",
  c: "credit",
  x: "training or likelier",
  o: "order",
  w: "spaces",
  "← →": "token",
  "/": "find",
  esc: "clear",
};

/** What an address does not say, because it is so without being said. */
const UNWRITTEN = { by: "token", asks: "training" };

export async function openGroupPage(context) {
  const { source, run } = context;
  const path = `runs/${run.id}/steps/${context.step}/groups/${context.group}`;
  const [structure, floats] = await Promise.all([source.json(path), source.floats(`${path}/tokens`)]);
  const group = new Group(structure, floats);
  const counterfactual = await new Counterfactual(source, path, group).load();
  return () => new GroupPage(context, group, new PairwiseInfluence(source, path, group), counterfactual);
}

class GroupPage extends Page {
  constructor(context, group, pairwise, counterfactual) {
    super(context, `group ${group.structure.group}, step ${group.structure.step}`, HINTS);
    this.group = group;
    this.pairwise = pairwise;
    this.counterfactual = counterfactual;
    this.tail = group.pairwise ? "Click a token or r0 to see what influences what." : "";
    this.abort = new AbortController();
    this.readState();
    this.node.append(
      storyLine(group, (token) => this.select(token).catch(context.fail)),
      promptSection(group, this.score, this.historyHref()),
    );
    for (const problem of group.structure.problems) this.node.append(element("p", "notice problem", problem));
    const why = whyNoInfluence(group);
    if (why) this.node.append(element("p", "strip notice", why));
    if (group.responses.length) this.build();
    else this.node.append(responsesNotStored());
  }

  historyHref() {
    const { step, group } = this.group.structure;
    return this.context.source.isLive ? this.context.href("find", { what: "prompt", step, group }) : null;
  }

  readState() {
    const { group, url } = this;
    const channels = Object.keys(CHANNELS);
    this.view = url.choice("view", Object.keys(VIEWS), this.defaultView());
    this.scale = url.choice("scale", SCALES, "group");
    this.order = url.choice("order", ORDERS);
    this.by = url.choice("by", this.units);
    this.credit = url.choice("credit", group.credits.length ? group.credits : ["position"]);
    this.asks = group.structure.likelier ? url.choice("asks", Object.keys(QUESTIONS)) : "training";
    const second = group.credits.length ? "influence" : "entropy";
    this.channels = [url.choice("left", channels, "entropy"), url.choice("right", channels, second)];
    this.showsSpaces = url.get("spaces") === "1";
    this.target = null;
    this.targetValues = null;
    this.current = -1;
  }

  /** What numbers can be shown for. */
  get units() {
    return UNITS.filter((unit) => unit !== "turn" || this.group.hasTurns);
  }

  /** Which of the scores is shown: that of a credit, or that of making a token likelier. */
  get score() {
    return this.asks === "likelier" ? LIKELIER : this.credit;
  }

  /** Side by side, unless columns would be too narrow; without influence there is nothing to put beside entropy. */
  defaultView() {
    if (!this.group.credits.length || innerWidth <= SMALL) return "one";
    return innerWidth < NARROW || !fitsSideBySide(this.group, innerWidth) ? "stack" : "side";
  }

  build() {
    const { group } = this;
    this.sheet = new Sheet(group, {
      channel: (slot, channel) => this.setChannel(slot, channel),
      target: (index) => this.setTarget(this.target === index ? null : index).catch(this.context.fail),
      jump: (index, position) => this.jumpTo(index, position),
      spread: (index, on) => this.spread(index, on),
    });
    this.finder = new FindBar(this.sheet, this.url.get("find"), {
      change: (needle) => this.url.update({ find: needle || null }),
      jump: (index, position) => this.jumpTo(index, position),
    });
    this.diff = new DiffPanel(group, pairIn(this.url.get("diff")), (now) =>
      this.url.update({ diff: now?.join(".") ?? null }),
    );
    this.node.append(this.makeControls(), this.diff.node, this.sheet.node);
    this.readout = new Readout();
    this.dock = new Dock({ onClose: () => this.clearSelection(), onJump: (index) => this.jumpTo(index) });
    this.rail = group.isChain ? null : new Rail(group, (index) => this.jumpTo(index));
    const continuations = new Continuations(this.counterfactual, {
      measured: () => {
        this.recolour();
        return this.selection.token === null ? null : this.select(this.selection.token);
      },
      resized: () => this.selection.token !== null && this.selection.makeRoom(this.dock.height),
      fail: this.context.fail,
    });
    this.selection = new TokenSelection(this.sheet, this.pairwise, this.dock, this.rail, continuations);
    listenToTokens(this);
  }

  makeControls() {
    this.controls = groupControls(this.group, this, (name, value) => this.choose(name, value).catch(this.context.fail));
    const parts = [...Object.values(this.controls), this.diff.chooser, this.finder.node];
    const controls = element("div", "controls strip group-controls", ...parts);
    const fold = element("details", "controls-fold", element("summary", "", "View, colours and search"), controls);
    fold.open = innerWidth > SMALL;
    return fold;
  }

  /** Called once the node is in the document. */
  mounted() {
    if (!this.sheet) return;
    document.body.append(this.readout.node, this.dock.node);
    if (this.rail) document.body.append(this.rail.node);
    this.applyOrder();
    this.layOut();
    this.recolour();
    this.sheet.begin();
    this.restore().catch(this.context.fail);
  }

  /** What the address says beyond the look of the page. */
  async restore() {
    const { url } = this;
    const target = url.number("target");
    if (target !== null && this.sheet.rows[target]) await this.setTarget(target);
    if (url.get("find")) this.finder.find(url.get("find"));
    const at = url.number("at");
    if (at !== null && this.sheet.rows[at]) this.jumpTo(at);
    const [index, position] = pairIn(url.get("sel")) ?? [];
    const response = this.group.responses[index];
    if (position < response?.length) await this.select(response.start + position);
  }

  /* ---------- choices ---------- */

  /** Take a choice: keep it, and show what follows from it. */
  async choose(name, value) {
    this.keep(name, value);
    if (name === "credit") this.keep("asks", "training");
    const show = {
      view: () => this.layOut(),
      scale: () => this.recolour(),
      by: () => this.recolour(),
      credit: () => this.changeScore(),
      asks: () => this.changeScore(),
      order: () => this.applyOrder(),
    };
    await show[name]();
  }

  /** Keep a choice here, on its control and in the address. */
  keep(name, value) {
    this[name] = value;
    this.controls[name].select(value);
    this.url.update({ [name]: value === UNWRITTEN[name] ? null : value });
  }

  layOut() {
    this.sheet.layOut(this.view, this.showsSpaces);
  }

  setChannel(slot, channel) {
    this.channels[slot] = channel;
    this.url.update({ left: this.channels[0], right: this.channels[1] });
    this.recolour();
  }

  async changeScore() {
    this.recolour();
    if (this.order === "influence") this.applyOrder();
    if (this.selection.token !== null) await this.select(this.selection.token);
  }

  applyOrder() {
    this.sheet.place(this.order, this.score);
    this.placeRail();
  }

  spread(index, on) {
    this.sheet.spread(index, on);
    this.placeRail();
  }

  placeRail() {
    this.rail?.place(this.sheet.responses);
    this.showRail();
  }

  toggleSpaces() {
    this.showsSpaces = !this.showsSpaces;
    this.url.update({ spaces: this.showsSpaces ? "1" : null });
    this.layOut();
  }

  recolour() {
    const { group, scale, by, score: credit } = this;
    const valuesFor = (channel) => (channel === "influence" ? this.targetValues : null);
    const make = (channel) => colouring(group, channel, { scale, by, credit, targetValues: valuesFor(channel) });
    this.sheet.paint(this.channels.map(make));
    this.showLegends();
    for (const row of this.sheet.rows) showTurns(row, credit, (index, position) => this.jumpTo(index, position));
    for (const row of this.sheet.rows) showCurve(row, (token) => this.select(token).catch(this.context.fail));
    this.tops = this.metricTops();
    const values = group.values("influence", credit);
    const sums = values ? group.responses.map((response) => Math.abs(sumOver(values, response))) : [1];
    this.sumStyle = numberStyle(Math.max(...sums));
    if (this.selection.token === null) this.showSums();
  }

  showSums() {
    for (const row of this.sheet.rows) showSums(row, this.score, this.sumStyle);
  }

  showLegends() {
    const { meta, responses } = this.group;
    this.sheet.explainWith({
      scale: this.scale,
      credit: this.score,
      targetCredit: this.pairwise.credit,
      target: this.target === null ? null : responses[this.target].name,
      onClearTarget: () => this.setTarget(null),
      sign: signWords(meta, this.score),
      unit: unitWords(meta),
      sentence: scoreSentence(meta, this.score),
    });
    this.sheet.markCurrent(this.target ?? this.current);
  }

  /** Tops for the small bars of readout and dock: always the group's. */
  metricTops() {
    const topOf = (channel) => scaleTop(this.group.values(channel) ?? new Float32Array(0));
    const tops = { entropy: topOf("entropy"), delta_v: topOf("delta_v") };
    for (const credit of this.group.scores) {
      tops[`influence_${credit}`] = scaleTop(this.group.values("influence", credit));
    }
    return tops;
  }

  retheme() {
    this.sheet?.drawOverview();
  }

  /* ---------- one response as the target, one token selected ---------- */

  async setTarget(index) {
    if (index !== null && !this.pairwise.isStored) {
      this.context.announce(this.pairwise.whyNot);
      return;
    }
    this.targetValues = index === null ? null : await this.pairwise.onResponse(index);
    this.target = index;
    if (index !== null && !this.channels.includes("influence")) this.channels[1] = "influence";
    this.url.update({ target: index });
    this.recolour();
    if (index !== null) this.context.announce(`Influence of every token on ${this.group.responses[index].name}`);
  }

  tokenContext(token) {
    const response = this.group.responses[this.group.responseOfToken[token]];
    const units = unitMetrics(this.by, this.sheet.colourings, token);
    const targetEffects = this.targetValues ? [this.targetEffect(token)] : [];
    return { response, units, targetEffects, tops: this.tops, credit: this.score };
  }

  targetEffect(token) {
    const shown = this.sheet.colourings.find(({ channel }) => channel === "influence");
    const text = numberStyle(shown ? largestTop(shown) : 1).signed(this.targetValues[token]);
    return { name: `on ${this.group.responses[this.target].name}`, text };
  }

  async select(token) {
    if (this.view === "read") this.choose("view", this.defaultView());
    const context = this.tokenContext(token);
    this.url.update({ sel: `${context.response.index}.${token - context.response.start}` });
    const words = await this.selection.show(token, context);
    if (words === null) return;
    this.showRail();
    this.context.announce(words);
  }

  clearSelection() {
    this.selection.clear();
    this.showSums();
    this.showRail();
    this.url.update({ sel: null });
  }

  showRail() {
    this.rail?.show(this.current, this.selection.tint?.classes, this.selection.tint?.words);
  }

  /* ---------- moving ---------- */

  jumpTo(index, position = null) {
    this.current = index;
    this.url.update({ at: index });
    this.sheet.markCurrent(index);
    this.showRail();
    this.sheet.scrollTo(index, position, this.dock.height);
  }

  moveRow(direction) {
    const order = this.sheet.responses.map((response) => response.index);
    const isThere = order.includes(this.current);
    const next = isThere ? neighbourIn(order, this.current, direction) : order.at(direction > 0 ? 0 : -1);
    this.jumpTo(next);
    this.context.announce(this.sheet.rows[next].node.getAttribute("aria-label"));
  }

  /** Move from the selected token, else from the first one of the response that has the focus or was jumped to. */
  moveToken(direction) {
    const selected = this.selection.token;
    if (selected === null) {
      const row = focusedRow() ?? this.sheet.rows[this.current];
      if (!row) return false;
      this.select(row.response.start);
      return true;
    }
    const { response } = this.sheet.rowOf(selected);
    this.select(Math.max(response.start, Math.min(response.end - 1, selected + direction)));
    return true;
  }

  selectFocused() {
    const row = focusedRow();
    if (!row || !document.activeElement.classList.contains("tokens")) return false;
    this.select(row.response.start);
    return true;
  }

  flag(token, flag, on) {
    const row = this.sheet.rowOf(token);
    row.flag(token - row.response.start, flag, on);
  }

  get actions() {
    const { group } = this;
    if (!this.sheet) return {};
    const next = (name, values) => this.choose(name, nextOf(values, this[name]));
    return {
      j: () => this.moveRow(1),
      k: () => this.moveRow(-1),
      v: () => next("view", Object.keys(VIEWS)),
      s: () => next("scale", SCALES),
      b: () => next("by", this.units),
      c: () => group.credits.length > 0 && next("credit", group.credits),
      x: () => group.structure.likelier && next("asks", Object.keys(QUESTIONS)),
      o: () => next("order", ORDERS),
      w: () => this.toggleSpaces(),
      ArrowRight: () => this.moveToken(1),
      ArrowLeft: () => this.moveToken(-1),
      Enter: () => this.selectFocused(),
      Escape: () => (this.selection.token === null ? this.setTarget(null) : this.clearSelection()),
    };
  }

  destroy() {
    super.destroy();
    this.abort.abort();
    this.sheet?.end();
    for (const part of [this.readout, this.dock, this.rail]) part?.node.remove();
    document.body.style.paddingBottom = "";
  }
}

/** "6.12" in the address → [6, 12]; null where it is nothing of the kind. */
function pairIn(text) {
  const pair = /^(\d+)\.(\d+)$/.exec(text ?? "");
  return pair && [Number(pair[1]), Number(pair[2])];
}

/** The response that has the focus. */
function focusedRow() {
  const focused = /** @type {HTMLElement & {row?: import("../group/rows.js").ResponseRow}} */ (document.activeElement);
  return focused?.row ?? null;
}
