// The sheet: column heads, the expected row, the overview, and the responses in their sections. It knows how things
// are laid out and painted; what is shown is decided by the page.

import { acceptedMark, append, button, element, setAttributes, whenNear } from "../dom.js";
import { largestSize } from "../statistics.js";
import { visibleText } from "../text.js";
import { LegendHead, explanation } from "./legend.js";
import { sumOver } from "./model.js";
import { Overview } from "./overview.js";
import { ResponseRow, estimatedLines, fillMetaCell, metaHead } from "./rows.js";

const CELL = { least: 16, most: 25, gap: 1, end: 66 };
const STACK_INDENT = 76;
const LINE_HEIGHT = 21;
const ROW_PADDING = 23;
const LOWEST_ROW = 130;
const MOST_SETTLING = 5;
/** Rows get their tokens when they come this near to the screen. */
const BUILD_AHEAD = "1200px";
const ORDER_KEYS = {
  reward: () => (response) => -response.reward,
  influence: (values) => {
    const sizes = values?.map(Math.abs);
    return (response) => (sizes ? -sumOver(sizes, response) : 0);
  },
  length: () => (response) => -response.length,
};
export const ORDERS = Object.keys(ORDER_KEYS);

/** Width of a chain's cell so that the longest chain fits a column; below CELL.least it does not. */
function cellWidth(group, column) {
  const longest = largestSize([...group.responses, group.expected].map(({ length }) => length));
  return Math.min(CELL.most, Math.floor((column - CELL.end) / Math.max(1, longest - 1)) - CELL.gap);
}

/** Would the chains of this group fit two columns of a window this wide? */
export function fitsSideBySide(group, windowWidth) {
  const column = (Math.min(windowWidth, 1760) - 48 - 232 - 56) / 2;
  return !group.isChain || cellWidth(group, column) >= CELL.least;
}

export class Sheet {
  /** on: {channel(slot, name), target(response), jump(response, position), spread(response, on)} */
  constructor(group, on) {
    this.group = group;
    this.on = on;
    this.node = element("div", `sheet ${group.isChain ? "chain" : "prose"}${group.isShort ? " compact" : ""}`);
    this.legends = [0, 1].map((slot) => new LegendHead(slot, (channel) => on.channel(slot, channel)));
    this.head = element("div", "sheet-head", metaHead(group), ...this.legends.map((legend) => legend.node));
    this.explain = element("div", "explain");
    this.overview = group.isChain ? null : new Overview(group, on.jump);
    this.rows = group.responses.map((response) => new ResponseRow(group, response, on.target));
    for (const row of this.rows) {
      fillMetaCell(row);
      if (row.response.twins.length > 1) this.collapse(row);
    }
    this.sections = makeSections(group);
    const expected = group.isChain && group.expected.length ? expectedRow(group) : null;
    append(this.node, this.head, this.explain, expected, this.overview?.node);
    append(this.node, ...this.sections.map((section) => section.node));
  }

  /** All responses, from top to bottom. */
  get allResponses() {
    return this.sections.flatMap((section) => section.members);
  }

  /** The responses as they are seen: of those with the same text only the first, unless they are spread out. */
  get responses() {
    return this.allResponses.filter((response) => !this.rows[response.index].node.hidden);
  }

  /** Spread out the responses that have the same text as this one, or collapse them again. */
  spread(index, on) {
    const { twins } = this.group.responses[index];
    for (const twin of twins) this.rows[twin].node.hidden = twin !== twins[0] && !on;
    setAttributes(this.rows[twins[0]].twinsButton, { "aria-expanded": String(on) });
    this.drawOverview();
  }

  /** ×7: the first of responses with the same text stands for them all. */
  collapse(row) {
    const { index, twins } = row.response;
    if (index !== twins[0]) {
      row.node.hidden = true;
      return;
    }
    const names = twins.map((twin) => this.group.responses[twin].name).join(", ");
    const toggle = () => this.on.spread(index, row.twinsButton.getAttribute("aria-expanded") !== "true");
    row.twinsButton = button("twins", `×${twins.length}`, toggle, {
      "aria-expanded": "false",
      title: `The same text: ${names}. Show each of them, or only the first.`,
    });
    const who = element("span", "who");
    row.name.replaceWith(who);
    who.append(row.name, row.twinsButton);
  }

  rowOf(token) {
    return this.rows[this.group.responseOfToken[token]];
  }

  /** Called once the sheet is in the document: only then do widths exist. */
  begin() {
    const rowOf = new Map(this.rows.map((row) => [row.node, row]));
    this.builder = whenNear(rowOf.keys(), BUILD_AHEAD, (node) => rowOf.get(node).build(this.colourings));
    if (this.group.isChain) for (const row of this.rows) row.build(this.colourings);
    let width = this.node.clientWidth;
    this.resize = new ResizeObserver(() => {
      this.measureHead();
      if (this.node.clientWidth === width) return;
      width = this.node.clientWidth;
      if (this.view !== "read") this.fit();
    });
    this.resize.observe(this.node);
  }

  end() {
    this.builder?.disconnect();
    this.resize?.disconnect();
  }

  /** Order applies within accepted and rejected. */
  place(order, score) {
    const key = ORDER_KEYS[order](this.group.values("influence", score));
    for (const section of this.sections) {
      section.members = [...section.members].sort((a, b) => key(a) - key(b) || a.index - b.index);
      section.node.append(...section.members.map((response) => this.rows[response.index].node));
    }
    this.drawOverview();
  }

  layOut(view, showsSpaces) {
    this.view = view;
    this.node.dataset.view = view;
    this.node.classList.toggle("spaces", showsSpaces);
    this.measureHead();
    if (view === "read") for (const row of this.rows) row.read();
    else this.fit();
  }

  measureHead() {
    const height = `${this.head.offsetHeight}px`;
    if (this.node.style.getPropertyValue("--head") !== height) this.node.style.setProperty("--head", height);
  }

  /** Everything that depends on the width. */
  fit() {
    const slot = this.rows[0].slots[1];
    const width = slot.clientWidth - (this.view === "stack" ? STACK_INDENT : 0);
    if (this.group.isChain) {
      const cell = Math.max(CELL.least, cellWidth(this.group, width));
      this.node.style.setProperty("--cell", `${cell}px`);
      this.node.style.setProperty("--cell-font", `${Math.min(16, Math.round(cell * 0.82))}px`);
    } else this.reserveHeights(slot, width);
    this.drawOverview();
  }

  /** Rows that are not drawn yet need a fair guess of their height, or jumps land on the wrong response. */
  reserveHeights(slot, width) {
    const probe = element("span", "t", "0".repeat(40));
    slot.append(probe);
    const character = probe.getBoundingClientRect().width / 40 || 7.6;
    probe.remove();
    const perLine = Math.max(16, Math.floor(width / character));
    for (const row of this.rows) {
      const lines = estimatedLines(row.response, perLine) * (this.view === "stack" ? 2 : 1);
      row.reserve(Math.max(this.group.isShort ? 0 : LOWEST_ROW, ROW_PADDING + lines * LINE_HEIGHT));
    }
  }

  paint(colourings) {
    this.colourings = colourings;
    for (const row of this.rows) row.paint(colourings);
    this.drawOverview();
  }

  drawOverview() {
    if (this.colourings) this.overview?.draw(this.responses, this.colourings);
  }

  /** Heads and explanations. @param {import("./legend.js").Shown} shown */
  explainWith(shown) {
    for (const [slot, legend] of this.legends.entries()) legend.show(this.colourings[slot], shown);
    const hasClipped = this.group.channels.get("no_step")?.includes(1) ?? false;
    const texts = this.colourings.map((each, slot) => explanation(slot, each, shown, hasClipped));
    this.explain.replaceChildren(element("span"), ...texts);
    this.measureHead();
  }

  markCurrent(index) {
    for (const row of this.rows) row.node.classList.toggle("current", row.response.index === index);
  }

  /** Bring a response (or one of its tokens) to where it can be read. `below`: height covered at the bottom. */
  scrollTo(index, position, below) {
    const row = this.rows[index];
    this.show(row);
    // Rows above may get their true height only now; look again until the place is steady.
    const settle = (tries) => {
      const before = row.node.getBoundingClientRect().top;
      if (position === null) row.node.scrollIntoView({ block: this.group.isChain ? "nearest" : "start" });
      else this.reveal(row, position, below);
      requestAnimationFrame(() => {
        if (tries > 0 && Math.abs(row.node.getBoundingClientRect().top - before) > 1) settle(tries - 1);
      });
    };
    settle(MOST_SETTLING);
  }

  /** See to it that a row is there to be looked at. */
  show(row) {
    if (row.node.hidden) this.on.spread(row.response.index, true);
    row.build(this.colourings);
  }

  /** Scroll only if the token is under the bar, the head or the dock. */
  reveal(row, position, below) {
    const span = row.spans.map((spans) => spans[position]).find((each) => each.offsetParent !== null);
    if (!span) return;
    const box = span.getBoundingClientRect();
    const top = this.head.getBoundingClientRect().bottom + 8;
    const bottom = innerHeight - below - 40;
    if (box.top < top) scrollBy(0, box.top - top);
    else if (box.bottom > bottom) scrollBy(0, box.bottom - bottom);
  }
}

function makeSections({ responses, mixed }) {
  const section = (title, mark, members) => {
    const count = element("span", "dim", `${members.length} of ${responses.length}`);
    const heading = element("h2", "section", mark, title, count);
    return { node: element("div", "", heading), heading, members };
  };
  if (!mixed) return [section("Responses", null, responses)];
  const side = (title, isAccepted) => {
    const members = responses.filter((response) => response.accepted === isAccepted);
    return section(title, acceptedMark(isAccepted), members);
  };
  const [accepted, rejected] = [side("Accepted", true), side("Rejected", false)];
  if (responses.some((response) => response.first_wrong !== null && response.first_wrong >= 0)) {
    rejected.heading.append(element("span", "dim first-wrong-key", element("i", "", "▾"), " first wrong token"));
  }
  return [accepted, rejected].filter((each) => each.members.length);
}

/** The right answer above the chains, with the numbers of the positions. */
function expectedRow(group) {
  const cells = (slot) => {
    const line = element("div", `tokens slot-${slot}`);
    for (const [position, entry] of group.expected.entries()) {
      const place = position % 4 === 0 && !entry.special ? position : null;
      const text = entry.text ?? visibleText(entry);
      line.append(element("span", entry.special ? "t x" : "t", { "data-place": place }, text));
    }
    return line;
  };
  return element("div", "expected", element("span", "caption", "Expected"), cells(0), cells(1));
}
