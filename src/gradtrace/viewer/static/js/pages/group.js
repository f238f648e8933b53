// The group page: a prompt and its responses as token heat maps, and what one token does to every response.

import { CHANNELS } from "../channels.js";
import { scaleTop } from "../colours.js";
import { nextOf, segmentedControl } from "../controls.js";
import { element } from "../dom.js";
import { scoreSentence, signWords, unitWords, withUnit } from "../format.js";
import { DiffPanel, FindBar, SMALL, choicesOf, defaultView, valuesOf } from "../group/controls.js";
import { Continuations, Counterfactual } from "../group/counterfactual.js";
import { Dock } from "../group/dock.js";
import { booksLines, promptSection, responsesNotStored, storyLine, whyNoInfluence } from "../group/head.js";
import { Group, sumOver } from "../group/model.js";
import { Rail } from "../group/overview.js";
import { PairwiseInfluence } from "../group/pairwise.js";
import { showCurve, showSums } from "../group/rows.js";
import { TokenSelection, listenToTokens } from "../group/selection.js";
import { Sheet } from "../group/sheet.js";
import { showTurns } from "../group/turns.js";
import { colouring, unitMetrics } from "../group/units.js";
import { largestSize } from "../statistics.js";
import { Page, neighbourIn, problemNotes } from "./page.js";

const HINTS = {
  "j k": "response",
  "h l": "group",
  "[ ]": "step",
  v: "view",
  s: "scale",
  b: "by token, sentence, line, turn",
  c: "score",
  o: "order",
  w: "spaces",
  "← →": "token",
  "/": "find",
  esc: "clear",
};

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
    const onShow = (token) => this.select(token).catch(context.fail);
    this.node.append(
      storyLine(group, onShow),
      ...booksLines(group, onShow),
      promptSection(group, this.score, this.historyHref()),
    );
    this.node.append(...problemNotes(group.structure));
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
    this.choices = choicesOf(group);
    const chosen = Object.entries(this.choices).map(([name, choice]) => [
      name,
      url.choice(name, valuesOf(choice), choice.otherwise),
    ]);
    /** What the reader has chosen: view, scale, by, score, order. @type {Record<string, string>} */
    this.chosen = Object.fromEntries(chosen);
    const channels = Object.keys(CHANNELS);
    const second = group.scores.length ? "influence" : "entropy";
    this.channels = [url.choice("left", channels, "entropy"), url.choice("right", channels, second)];
    this.showsSpaces = url.get("spaces") === "1";
    this.target = null;
    this.targetValues = null;
    this.current = -1;
  }

  /** Which of the scores is shown. */
  get score() {
    return this.chosen.score;
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
    const controls = Object.entries(this.choices).map(([name, { hidden = false, ...settings }]) => {
      const onChange = (value) => this.choose(name, value).catch(this.context.fail);
      return [name, Object.assign(segmentedControl({ ...settings, value: this.chosen[name], onChange }), { hidden })];
    });
    this.controls = Object.fromEntries(controls);
    const parts = [...Object.values(this.controls), this.diff.chooser, this.finder.node];
    const strip = element("div", "controls strip group-controls", ...parts);
    const fold = element("details", "controls-fold", element("summary", "", "View, colours and search"), strip);
    fold.open = innerWidth > SMALL;
    return fold;
  }

  /** Called once the node is in the document. */
  mounted() {
    if (!this.sheet) return;
    document.body.append(this.dock.node);
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
    const isScore = name === "score";
    if (name === "view") this.layOut();
    else if (name !== "order") this.recolour();
    if (name === "order" || (isScore && this.chosen.order === "influence")) this.applyOrder();
    if (isScore && this.selection.token !== null) await this.select(this.selection.token);
  }

  /** Keep a choice here, on its control and in the address. */
  keep(name, value) {
    const { otherwise, unwritten } = this.choices[name];
    this.chosen[name] = value;
    this.controls[name].select(value);
    this.url.update({ [name]: unwritten && value === otherwise ? null : value });
  }

  layOut() {
    this.sheet.layOut(this.chosen.view, this.showsSpaces);
  }

  setChannel(slot, channel) {
    this.channels[slot] = channel;
    this.url.update({ left: this.channels[0], right: this.channels[1] });
    this.recolour();
  }

  applyOrder() {
    this.sheet.place(this.chosen.order, this.score);
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
    const { group, score } = this;
    const targetOf = (channel) => (channel === "influence" ? this.targetValues : null);
    this.sheet.paint(this.channels.map((channel) => colouring(group, channel, this.chosen, targetOf(channel))));
    this.showLegends();
    for (const row of this.sheet.rows) {
      showTurns(row, score, (index, position) => this.jumpTo(index, position));
      showCurve(row, (token) => this.select(token).catch(this.context.fail));
    }
    this.tops = this.metricTops();
    const values = group.values("influence", score);
    const sums = values ? group.responses.map((each) => sumOver(values, each)) : [1];
    this.sumStyle = group.styleOf("influence", largestSize(sums));
    if (this.selection.token === null) this.showSums();
  }

  showSums() {
    for (const row of this.sheet.rows) showSums(row, this.score, this.sumStyle);
  }

  showLegends() {
    const { group } = this;
    const { meta, responses } = group;
    this.sheet.explainWith({
      group,
      score: this.score,
      targetScore: this.pairwise.score,
      target: responses[this.target]?.name ?? null,
      onClearTarget: () => this.setTarget(null),
      sign: signWords(meta, this.score),
      unit: unitWords(meta),
      sentence: scoreSentence(meta, this.score),
    });
    this.sheet.markCurrent(this.target ?? this.current);
  }

  /** Tops for the small bars of readout and dock: always the group's. */
  metricTops() {
    const topOf = (channel, score) => scaleTop(this.group.values(channel, score) ?? new Float32Array(0));
    const others = ["entropy", "delta_v", "influence_own"].map((channel) => [channel, topOf(channel)]);
    const scores = this.group.scores.map((score) => [score, topOf("influence", score)]);
    return Object.fromEntries([...others, ...scores]);
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

  /** @returns {import("../group/dock.js").TokenContext} */
  tokenContext(token) {
    const response = this.group.responses[this.group.responseOfToken[token]];
    const more = unitMetrics(this.group, this.chosen.by, this.sheet.colourings, token);
    if (this.targetValues) more.push(this.targetEffect(token));
    return { token, response, position: token - response.start, tops: this.tops, score: this.score, more };
  }

  targetEffect(token) {
    const shown = this.sheet.colourings.find(({ channel }) => channel === "influence");
    const style = this.group.styleOf("influence", shown ? largestSize(shown.tops) : 1);
    const text = withUnit(style.signed(this.targetValues[token]), style);
    return { name: `on ${this.group.responses[this.target].name}`, text };
  }

  async select(token) {
    if (this.chosen.view === "read") this.choose("view", defaultView(this.group));
    const context = this.tokenContext(token);
    this.url.update({ sel: `${context.response.index}.${context.position}` });
    const words = await this.selection.show(context);
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
    if (selected === null) return this.selectFirst(focusedRow() ?? this.sheet.rows[this.current]);
    const { response } = this.sheet.rowOf(selected);
    return this.select(Math.max(response.start, Math.min(response.end - 1, selected + direction)));
  }

  selectFirst(row) {
    return row ? this.select(row.response.start) : false;
  }

  flag(token, flag, on) {
    const row = this.sheet.rowOf(token);
    row.flag(token - row.response.start, flag, on);
  }

  get actions() {
    if (!this.sheet) return {};
    const next = ([name, choice]) => {
      const values = valuesOf(choice);
      return values.length > 1 && this.choose(name, nextOf(values, this.chosen[name]));
    };
    const choices = Object.entries(this.choices).map((each) => [each[1].key, () => next(each)]);
    return {
      ...Object.fromEntries(choices),
      j: () => this.moveRow(1),
      k: () => this.moveRow(-1),
      w: () => this.toggleSpaces(),
      ArrowRight: () => this.moveToken(1),
      ArrowLeft: () => this.moveToken(-1),
      Enter: () => this.selectFirst(focusedRow()),
      Escape: () => (this.selection.token === null ? this.setTarget(null) : this.clearSelection()),
    };
  }

  destroy() {
    super.destroy();
    this.abort.abort();
    this.sheet?.end();
    for (const part of [this.dock, this.rail]) part?.node.remove();
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
