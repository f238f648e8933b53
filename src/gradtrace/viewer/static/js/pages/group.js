// The group page: a prompt and its responses as token heat maps, and what one token does to every response.

import { CHANNELS, CREDIT_HINT, CREDIT_NAMES } from "../channels.js";
import { nextOf, searchBox, segmentedControl } from "../controls.js";
import { acceptedMark, element, emptyState, setAttributes } from "../dom.js";
import { numberStyle, plural } from "../format.js";
import { scaleTop, signedClass, signedClassName } from "../scales.js";
import { visibleText } from "../token_text.js";
import { colouring, largestTop, sharedTop } from "../group/colouring.js";
import { copiedText, slotOf } from "../group/copy.js";
import { Dock } from "../group/dock.js";
import { findInGroup } from "../group/find.js";
import { promptSection, whyNoInfluence } from "../group/header.js";
import { explanation, LegendHead } from "../group/legend.js";
import { fillMetaCell, metaHead, showEffect, showSums } from "../group/meta_cell.js";
import { Group, sizeOver } from "../group/model.js";
import { Overview } from "../group/overview.js";
import { contrast, PairwiseInfluence } from "../group/pairwise.js";
import { Rail } from "../group/rail.js";
import { Readout } from "../group/readout.js";
import { estimatedLines, ResponseRow, RowBuilder } from "../group/rows.js";

const VIEWS = ["side", "stack", "one"];
const SCALES = ["response", "group", "step"];
const ORDERS = ["reward", "influence", "length"];
const CHANNEL_NAMES = Object.keys(CHANNELS);
const NARROW = 1100;
const CELL = { least: 16, most: 25, gap: 1, end: 66 };
const STRONGEST_TINT = 3;
const DEFAULT_SIGN = "a step along this token’s gradient helps the accepted responses against the rejected ones.";

export const GROUP_HINTS = [
  ["j k", "response"], ["h l", "group"], ["[ ]", "step"], ["v", "view"], ["s", "scale"], ["c", "credit"], ["o", "order"],
  ["w", "spaces"], ["← →", "token"], ["/", "find"], ["esc", "clear"],
];

export async function openGroupPage(context) {
  const { source, run, url } = context;
  const path = `runs/${run.id}/steps/${context.step}/groups/${context.group}`;
  const [structure, floats] = await Promise.all([source.json(path), source.floats(`${path}/tokens`)]);
  const group = new Group(structure, floats);
  return () => new GroupPage(context, group, new PairwiseInfluence(source, path, group), url);
}

class GroupPage {
  constructor(context, group, pairwise, url) {
    Object.assign(this, { context, group, pairwise, url });
    this.title = `group ${group.structure.group}, step ${group.structure.step}`;
    this.hints = GROUP_HINTS;
    this.tail = group.pairwise ? "Click a token or r0 to see what influences what." : "";
    this.abort = new AbortController();
    this.readState();
    this.node = element("div");
    this.drawHead();
    if (!group.responses.length) {
      this.node.append(emptyState("The responses of this group were not stored", "An influence trace holds only the responses of scored groups. With trainer.entropy_trace.enable=true every response is there."));
      return;
    }
    this.makeSheet();
    this.makeFloating();
    this.listen();
  }

  readState() {
    const { group, url } = this;
    const credits = group.credits.length ? group.credits : ["position"];
    const first = group.credits.length ? "influence" : "entropy";
    this.view = url.choice("view", VIEWS, this.defaultView());
    this.scale = url.choice("scale", SCALES, "group");
    this.order = url.choice("order", ORDERS);
    this.credit = url.choice("credit", credits);
    this.channels = [url.choice("left", CHANNEL_NAMES, "entropy"), url.choice("right", CHANNEL_NAMES, first)];
    this.showsSpaces = url.get("spaces") === "1";
    this.needle = url.get("find") ?? "";
    this.selected = null;
    this.target = null;
    this.targetValues = null;
    this.current = -1;
    this.hits = [];
    this.hitIndex = -1;
  }

  /** Columns side by side, unless they would be too narrow; without influence there is nothing to put beside entropy. */
  defaultView() {
    const { group } = this;
    if (!group.credits.length) return "one";
    if (innerWidth < NARROW) return "stack";
    const column = (Math.min(innerWidth, 1760) - 48 - 232 - 56) / 2;
    return group.isChain && this.cellWidth(column) < CELL.least ? "stack" : "side";
  }

  /** Cells are as wide as fits, so that a chain stays on one line and positions stand under one another. */
  cellWidth(column) {
    const longest = Math.max(1, ...this.group.responses.map((response) => response.length), this.group.expected.length);
    return Math.min(CELL.most, Math.floor((column - CELL.end) / Math.max(1, longest - 1)) - CELL.gap);
  }

  fitCells() {
    if (!this.group.isChain) return;
    const width = Math.max(CELL.least, this.cellWidth(this.rows[0].slots[1].clientWidth - (this.view === "stack" ? 76 : 0)));
    this.sheet.style.setProperty("--cell", `${width}px`);
    this.sheet.style.setProperty("--cell-font", `${Math.min(16, Math.round(width * 0.82))}px`);
  }

  /* ---------- building ---------- */

  drawHead() {
    const { group } = this;
    this.node.append(promptSection(group, this.credit));
    for (const problem of group.structure.problems) this.node.append(element("p", "notice problem", problem));
    const why = whyNoInfluence(group);
    if (why) this.node.append(element("p", "strip notice", why));
    if (group.responses.length) this.node.append(this.makeControls());
  }

  makeControls() {
    const { group } = this;
    const has = (credit) => group.credits.includes(credit);
    this.controls = {
      view: segmentedControl({ label: "View", value: this.view, onChange: (value) => this.setView(value),
        options: [{ value: "side", label: "side by side" }, { value: "stack", label: "stacked" }, { value: "one", label: "one" }] }),
      scale: segmentedControl({ label: "Colour scale, 99th pct. of", value: this.scale, onChange: (value) => this.setScale(value),
        options: SCALES.map((value) => ({ value, label: value })) }),
      credit: segmentedControl({ label: "Credit", value: this.credit, hint: CREDIT_HINT, onChange: (value) => this.setCredit(value),
        options: Object.entries(CREDIT_NAMES).map(([value, label]) => ({ value, label, disabled: !has(value), why: has(value) ? "" : `this trace does not hold ${label} credit (trainer.influence_trace.credit)` })) }),
      order: segmentedControl({ label: "Order", value: this.order, onChange: (value) => this.setOrder(value),
        options: ORDERS.map((value) => ({ value, label: value, disabled: value === "influence" && !group.credits.length })) }),
    };
    if (!group.credits.length) this.controls.credit.hidden = true;
    this.findBox = searchBox("Find in responses", "Find in responses", this.needle, (value) => this.find(value));
    this.findCount = setAttributes(element("span"), { "aria-live": "polite" });
    this.findBox.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.nextHit(event.shiftKey ? -1 : 1);
    });
    return element("div", "controls strip group-controls", ...Object.values(this.controls), element("div", "find", this.findBox, this.findCount));
  }

  makeSheet() {
    const { group } = this;
    this.sheet = element("div", `sheet ${group.isChain ? "chain" : "prose"}`);
    this.legends = [0, 1].map((slot) => new LegendHead(slot, (channel) => this.setChannel(slot, channel)));
    this.head = element("div", "sheet-head", metaHead(group), ...this.legends.map((legend) => legend.node));
    this.explain = element("div", "explain");
    this.sheet.append(this.head, this.explain);
    if (group.isChain && group.expected.length) this.sheet.append(this.expectedRow());
    if (!group.isChain) {
      this.overview = new Overview(group, (index, position) => this.jumpTo(index, position));
      this.sheet.append(this.overview.node);
    }
    this.rows = group.responses.map((response) => new ResponseRow(group, response, (index) => this.setTarget(this.target === index ? null : index)));
    for (const row of this.rows) fillMetaCell(row);
    this.sections = this.makeSections();
    this.sheet.append(...this.sections.map((section) => section.node));
    this.node.append(this.sheet);
  }

  makeSections() {
    const { responses, mixed } = this.group;
    const section = (title, mark, members) => {
      const heading = element("h3", "section", mark, title, element("span", "dim", `${members.length} of ${responses.length}`));
      return { node: element("div", "", heading), heading, members };
    };
    if (!mixed) return [section("Responses", null, responses)];
    const accepted = section("Accepted", acceptedMark(true), responses.filter((response) => response.accepted));
    const rejected = section("Rejected", acceptedMark(false), responses.filter((response) => !response.accepted));
    if (responses.some((response) => response.first_wrong >= 0 && response.first_wrong !== null)) {
      rejected.heading.append(element("span", "dim first-wrong-key", element("i", "", "▾"), " first wrong token"));
    }
    return [accepted, rejected].filter((each) => each.members.length);
  }

  expectedRow() {
    const cells = (slot) => {
      const line = element("div", `tokens slot-${slot}`);
      for (const [position, entry] of this.group.expected.entries()) {
        const cell = element("span", entry.special ? "t x" : "t", entry.text ?? visibleText(entry));
        if (position % 4 === 0 && !entry.special) cell.dataset.place = position;
        line.append(cell);
      }
      return line;
    };
    return element("div", "expected", element("span", "caption", "Expected"), cells(0), cells(1));
  }

  makeFloating() {
    this.readout = new Readout();
    this.dock = new Dock({ onClose: () => this.clearSelection(), onJump: (index) => this.jumpTo(index) });
    this.floating = [this.readout.node, this.dock.node];
    if (!this.group.isChain) {
      this.rail = new Rail(this.group, (index) => this.jumpTo(index));
      this.floating.push(this.rail.node);
    }
  }

  /** Called once the node is in the document: only then do widths exist. */
  mounted() {
    if (!this.sheet) return;
    document.body.append(...this.floating);
    this.applyOrder();
    this.applyView();
    this.recolour();
    this.reserveHeights();
    this.builder = new RowBuilder(this.rows, () => this.colourings);
    if (this.group.isChain) for (const row of this.rows) this.builder.build(row);
    this.watchWidth();
    this.restoreFromUrl();
  }

  async restoreFromUrl() {
    const { url } = this;
    const target = url.number("target");
    if (target !== null && this.rows[target]) await this.setTarget(target);
    if (this.needle) this.find(this.needle);
    const at = url.number("at");
    if (at !== null && this.rows[at]) this.jumpTo(at);
    const chosen = /^(\d+)\.(\d+)$/.exec(url.get("sel") ?? "");
    const response = chosen && this.group.responses[Number(chosen[1])];
    if (response && Number(chosen[2]) < response.length) await this.select(response.start + Number(chosen[2]));
  }

  watchWidth() {
    let width = this.sheet.clientWidth;
    this.resize = new ResizeObserver(() => {
      this.sheet.style.setProperty("--head", `${this.head.offsetHeight}px`);
      if (this.sheet.clientWidth === width) return;
      width = this.sheet.clientWidth;
      this.fitCells();
      this.reserveHeights();
      this.drawOverview();
    });
    this.resize.observe(this.sheet);
  }

  /* ---------- state → page ---------- */

  get orderedResponses() {
    return this.sections.flatMap((section) => section.members);
  }

  get orderedRows() {
    return this.orderedResponses.map((response) => this.rows[response.index]);
  }

  setView(view) {
    this.view = view;
    this.controls.view.select(view);
    this.url.update({ view });
    this.applyView();
    this.reserveHeights();
    this.drawOverview();
  }

  applyView() {
    this.sheet.dataset.view = this.view;
    this.fitCells();
    this.sheet.classList.toggle("spaces", this.showsSpaces);
    this.sheet.style.setProperty("--head", `${this.head.offsetHeight}px`);
  }

  setScale(scale) {
    this.scale = scale;
    this.controls.scale.select(scale);
    this.url.update({ scale });
    this.recolour();
  }

  setChannel(slot, channel) {
    this.channels[slot] = channel;
    this.url.update({ left: this.channels[0], right: this.channels[1] });
    this.recolour();
  }

  async setCredit(credit) {
    if (!this.group.credits.includes(credit)) return;
    this.credit = credit;
    this.controls.credit.select(credit);
    this.url.update({ credit });
    if (this.target !== null && !this.pairwise.holds(credit)) await this.setTarget(null);
    this.recolour();
    if (this.order === "influence") this.applyOrder();
    if (this.selected !== null) await this.select(this.selected);
  }

  setOrder(order) {
    this.order = order;
    this.controls.order.select(order);
    this.url.update({ order });
    this.applyOrder();
    this.drawOverview();
  }

  applyOrder() {
    const values = this.group.values("influence", this.credit);
    const keys = {
      reward: (response) => -response.reward,
      influence: (response) => (values ? -sizeOver(values, response) : 0),
      length: (response) => -response.length,
    };
    const key = keys[this.order];
    for (const section of this.sections) {
      section.members = [...section.members].sort((a, b) => key(a) - key(b) || a.index - b.index);
      section.node.append(...section.members.map((response) => this.rows[response.index].node));
    }
    this.rail?.place(this.orderedResponses);
    this.showRail();
  }

  recolour() {
    const { group } = this;
    this.colourings = this.channels.map((channel) =>
      colouring(group, channel, { scale: this.scale, credit: this.credit, targetValues: channel === "influence" ? this.targetValues : null }),
    );
    for (const row of this.rows) row.paint(this.colourings);
    this.showLegends();
    this.tops = this.metricTops();
    const values = group.values("influence", this.credit);
    this.sumStyle = numberStyle(values ? Math.max(...group.responses.map((response) => sizeOver(values, response) / 4)) : 1, 2);
    if (this.selected === null) for (const row of this.rows) showSums(row, this.credit, this.sumStyle);
    this.drawOverview();
  }

  showLegends() {
    const target = this.target === null ? null : this.group.responses[this.target].name;
    const { meta } = this.group;
    for (const [slot, legend] of this.legends.entries()) {
      const top = sharedTop(this.colourings[slot], this.scale);
      legend.show({ channel: this.channels[slot], credit: this.credit, top, perResponse: top === null, target, onClearTarget: () => this.setTarget(null) });
    }
    const sign = meta.sign ? `${String(meta.sign).replace(/^positive = /, "")}.` : DEFAULT_SIGN;
    const aggregation = aggregationLine(meta);
    this.explain.replaceChildren(element("span"), ...this.channels.map((channel, slot) => explanation(slot, channel, target, { sign, aggregation })));
    for (const row of this.rows) row.node.classList.toggle("current", row.response.index === (this.target ?? this.current));
  }

  /** Tops for the small bars of readout and dock: always the group's. */
  metricTops() {
    const tops = { entropy: scaleTop(this.group.values("entropy") ?? new Float32Array(0)) };
    for (const credit of this.group.credits) tops[`influence_${credit}`] = scaleTop(this.group.values("influence", credit));
    return tops;
  }

  reserveHeights() {
    if (this.group.isChain) return;
    const slot = this.rows[0].slots[1];
    const probe = element("span", "t", "0".repeat(40));
    slot.append(probe);
    const character = probe.getBoundingClientRect().width / 40 || 7.6;
    probe.remove();
    const perLine = Math.max(16, Math.floor((slot.clientWidth - (this.view === "stack" ? 76 : 0)) / character));
    for (const row of this.rows) {
      const lines = estimatedLines(row.response, perLine) * (this.view === "stack" ? 2 : 1);
      row.reserve(Math.max(130, 23 + lines * 21));
    }
  }

  drawOverview() {
    this.overview?.draw(this.orderedResponses, this.colourings);
  }

  retheme() {
    if (this.sheet) this.drawOverview();
  }

  /* ---------- one response as the target ---------- */

  async setTarget(index) {
    if (index !== null && !this.pairwise.holds(this.credit)) {
      this.context.announce(this.whyNoEffects());
      return;
    }
    this.targetValues = index === null ? null : await this.pairwise.onResponse(index);
    this.target = index;
    if (index !== null && !this.channels.includes("influence")) this.channels[1] = "influence";
    this.url.update({ target: index });
    this.recolour();
    if (index !== null) this.context.announce(`Influence of every token on ${this.group.responses[index].name}`);
  }

  whyNoEffects() {
    const { pairwise } = this.group;
    if (pairwise) return `The effects on single responses were stored for ${CREDIT_NAMES[pairwise.credit] ?? "another"} credit only. Press c to switch.`;
    if (!this.group.credits.length) return "This group was not scored, so there is no influence to show.";
    return "The effects on single responses were not stored for this group: the step would have exceeded trainer.influence_trace.pairwise_max_mb.";
  }

  /* ---------- one token selected ---------- */

  tokenContext(token) {
    const response = this.group.responses[this.group.responseOfToken[token]];
    const context = { response, tops: this.tops, credit: this.credit };
    if (this.targetValues) {
      const style = numberStyle(largestTop(this.colourings[1]));
      context.targetEffect = { name: `on ${this.group.responses[this.target].name}`, text: style.signed(this.targetValues[token]) };
    }
    return context;
  }

  async select(token) {
    this.clearSelection({ keepDock: true });
    this.selected = token;
    const context = this.tokenContext(token);
    const { response } = context;
    const position = token - response.start;
    const row = this.rows[response.index];
    this.builder.build(row);
    row.flag(position, "sel", true);
    this.url.update({ sel: `${response.index}.${position}` });
    const effects = await this.effectsOf(response, position, token);
    if (this.selected !== token) return; // another token was chosen while this one's numbers were on their way
    this.dock.show(this.group, token, context, effects, this.orderedResponses);
    document.body.style.setProperty("--dock", `${this.dock.height}px`);
    this.tintRows(effects, response);
    this.bringIntoView(row, position);
    this.announceToken(token, context, effects);
  }

  async effectsOf(response, position, token) {
    if (!this.pairwise.holds(this.credit)) return { values: null, why: this.whyNoEffects() };
    const values = await this.pairwise.ofToken(response.index, position);
    if (!values || !values.some(Number.isFinite)) return { values: null, why: "This token's gradient was not captured." };
    const { members } = this.pairwise;
    const { meta } = this.group;
    return {
      members, values, score: this.group.values("influence", this.credit)[token], creditName: CREDIT_NAMES[this.credit],
      sum: contrast(members, values, meta, response.index), excludesSelf: Boolean(meta.exclude_self_response),
    };
  }

  /** Meta cells and rail take the tint; the colours of the tokens never change. */
  tintRows(effects, own) {
    if (!effects.values) return;
    const largest = Math.max(...Array.from(effects.values).filter(Number.isFinite).map(Math.abs));
    const style = numberStyle(largest);
    const tints = [];
    const words = [];
    for (const row of this.rows) {
      const column = effects.members.findIndex((member) => member.response === row.response.index);
      const value = column >= 0 ? effects.values[column] : NaN;
      const level = Number.isFinite(value) ? signedClass(value, largest * 1.67) : 0;
      const tint = signedClassName(Math.sign(level) * Math.min(STRONGEST_TINT, Math.abs(level)));
      row.meta.className = `meta tinted ${tint}`;
      showEffect(row, style.signed(value), row.response.index === own.index);
      tints[row.response.index] = tint;
      words[row.response.index] = `influence on it ${style.signed(value)}`;
    }
    this.railTint = { tints, words };
    this.showRail();
  }

  showRail() {
    this.rail?.show(this.current, this.railTint?.tints, this.railTint?.words);
  }

  clearSelection({ keepDock = false } = {}) {
    if (this.selected !== null) {
      const response = this.group.responses[this.group.responseOfToken[this.selected]];
      this.rows[response.index].flag(this.selected - response.start, "sel", false);
    }
    this.selected = null;
    if (keepDock) return;
    this.dock.hide();
    document.body.style.removeProperty("--dock");
    this.railTint = null;
    this.showRail();
    for (const row of this.rows) {
      row.meta.className = "meta";
      showSums(row, this.credit, this.sumStyle);
    }
    this.url.update({ sel: null });
  }

  announceToken(token, { response }, effects) {
    const score = effects.values ? `, influence ${numberStyle(Math.abs(effects.score)).signed(effects.score)}` : "";
    this.context.announce(`${visibleText(this.group.entry(token), this.group.piece(token))}, ${response.name} position ${token - response.start}${score}`);
  }

  /** Scroll only if the token is under the bar, the head or the dock. */
  bringIntoView(row, position) {
    const span = row.spans.map((spans) => spans[position]).find((each) => each.offsetParent !== null);
    if (!span) return;
    const box = span.getBoundingClientRect();
    const top = this.head.getBoundingClientRect().bottom + 8;
    const bottom = innerHeight - this.dock.height - 40;
    if (box.top < top) scrollBy(0, box.top - top);
    else if (box.bottom > bottom) scrollBy(0, box.bottom - bottom);
  }

  /* ---------- moving ---------- */

  jumpTo(index, position = null) {
    const row = this.rows[index];
    this.current = index;
    this.url.update({ at: index });
    for (const each of this.rows) each.node.classList.toggle("current", each === row);
    this.showRail();
    this.builder.build(row);
    // Rows above may get their true height only now; look again until the place is steady.
    let tries = 0;
    const settle = () => {
      const before = row.node.getBoundingClientRect().top;
      if (position === null) row.node.scrollIntoView({ block: this.group.isChain ? "nearest" : "start" });
      else this.bringIntoView(row, position);
      if (tries++ < 5) requestAnimationFrame(() => Math.abs(row.node.getBoundingClientRect().top - before) > 1 && settle());
    };
    settle();
  }

  moveRow(direction) {
    const order = this.orderedResponses;
    const at = order.findIndex((response) => response.index === this.current);
    const next = at < 0 ? (direction > 0 ? 0 : order.length - 1) : Math.max(0, Math.min(order.length - 1, at + direction));
    this.jumpTo(order[next].index);
    this.context.announce(this.rows[order[next].index].node.getAttribute("aria-label"));
  }

  moveToken(direction) {
    const start = this.selected ?? this.firstTokenOfFocus();
    if (start === null) return false;
    const response = this.group.responses[this.group.responseOfToken[start]];
    const next = this.selected === null ? start : Math.max(response.start, Math.min(response.end - 1, start + direction));
    this.select(next);
    return true;
  }

  firstTokenOfFocus() {
    const row = document.activeElement?.row ?? this.rows[this.current];
    return row ? row.response.start : null;
  }

  find(needle) {
    this.needle = needle;
    this.url.update({ find: needle || null });
    for (const hit of this.hits) this.flagHit(hit, false);
    this.hits = findInGroup(this.orderedResponses, needle);
    this.hitIndex = -1;
    for (const hit of this.hits) this.flagHit(hit, true);
    this.findCount.textContent = needle ? plural(this.hits.length, "hit") : "";
  }

  flagHit({ response, from, to }, on) {
    for (let position = from; position < to; position++) this.rows[response.index].flag(position, "found", on);
  }

  nextHit(direction) {
    if (!this.hits.length) return;
    this.hitIndex = (this.hitIndex + direction + this.hits.length) % this.hits.length;
    const hit = this.hits[this.hitIndex];
    this.findCount.textContent = `${this.hitIndex + 1} of ${this.hits.length}`;
    this.jumpTo(hit.response.index, hit.from);
  }

  /* ---------- events ---------- */

  listen() {
    const { sheet } = this;
    let under = null;
    const hover = (token) => {
      if (under !== null) this.flagToken(under, "hov", false);
      under = token;
      if (token === null) return this.readout.hide();
      this.flagToken(token, "hov", true);
      this.readout.show(this.group, token, this.tokenContext(token));
    };
    sheet.addEventListener("pointerover", (event) => hover(tokenOf(event.target)));
    sheet.addEventListener("pointerleave", () => hover(null));
    sheet.addEventListener("pointerdown", (event) => {
      const slot = slotOf(event.target);
      if (slot !== null) sheet.dataset.selecting = slot;
    });
    sheet.addEventListener("click", (event) => {
      const token = tokenOf(event.target);
      if (token === null || !getSelection().isCollapsed) return; // a drag that selected text is not a click
      if (token === this.selected) this.clearSelection();
      else this.select(token).catch((error) => this.context.fail(error));
    });
    document.addEventListener("copy", (event) => {
      if (!sheet.contains(getSelection().anchorNode)) return;
      const text = copiedText(this.group, this.orderedRows, getSelection());
      if (text === null) return;
      event.clipboardData.setData("text/plain", text);
      event.preventDefault();
    }, { signal: this.abort.signal });
  }

  flagToken(token, flag, on) {
    const response = this.group.responses[this.group.responseOfToken[token]];
    this.rows[response.index].flag(token - response.start, flag, on);
  }

  /** True if the key meant something here. */
  key(event) {
    if (!this.sheet) return false;
    const actions = {
      j: () => this.moveRow(1),
      k: () => this.moveRow(-1),
      v: () => this.setView(nextOf(VIEWS, this.view)),
      s: () => this.setScale(nextOf(SCALES, this.scale)),
      c: () => this.setCredit(nextOf(Object.keys(CREDIT_NAMES), this.credit)),
      o: () => this.setOrder(nextOf(ORDERS, this.order)),
      w: () => this.toggleSpaces(),
      ArrowRight: () => this.moveToken(1),
      ArrowLeft: () => this.moveToken(-1),
      Enter: () => this.selectFocused(),
      Escape: () => (this.selected !== null ? this.clearSelection() : this.setTarget(null)),
    };
    const action = actions[event.key];
    if (!action) return false;
    return action() !== false;
  }

  selectFocused() {
    const row = document.activeElement?.row;
    if (!row || !document.activeElement.classList.contains("tokens")) return false;
    this.select(row.response.start);
    return true;
  }

  toggleSpaces() {
    this.showsSpaces = !this.showsSpaces;
    this.url.update({ spaces: this.showsSpaces ? "1" : null });
    this.sheet.classList.toggle("spaces", this.showsSpaces);
  }

  destroy() {
    this.abort.abort();
    this.builder?.disconnect();
    this.resize?.disconnect();
    for (const node of this.floating ?? []) node.remove();
    document.body.style.removeProperty("--dock");
  }
}

function tokenOf(node) {
  const span = node.closest?.(".t");
  return span && span.token !== undefined ? span.token : null;
}

/** How single effects became one score, in words. */
function aggregationLine(meta) {
  const how = { mean: "mean effect on the accepted minus mean effect on the rejected", sum: "summed effect on the accepted minus that on the rejected", advantage: "effects weighted by advantage" }[meta.contrastive_agg];
  const parts = [how, { inverse: "inverse-Hessian geometry", identity: "plain gradient geometry" }[meta.hessian_mode]].filter(Boolean);
  if (meta.accepted_rejected_scope === "all_selected") parts.push("over all selected responses of the step");
  return parts.length ? `Score: ${parts.join(", ")}.` : "";
}
