// The responses: a meta cell and two heat maps each. Spans are made when a row comes near the screen, so that a group
// of 16 × 4,096 tokens opens as fast as a small one.

import { CHANNELS, classNameOf } from "../channels.js";
import { acceptedMark, append, button, element, setAttributes } from "../dom.js";
import { richText } from "../rich_text.js";
import { drawingClass, drawnText, rawText } from "../token_text.js";
import { chat } from "./turns.js";

export class ResponseRow {
  constructor(group, response, onTarget) {
    this.group = group;
    this.response = response;
    this.spans = [null, null];
    this.flags = new Map();
    this.meta = element("div", "meta");
    this.remarks = element("div", "remarks");
    this.slots = [0, 1].map((slot) => {
      const tokens = element("div", `tokens slot-${slot}`, { tabindex: 0, role: "group" });
      return Object.assign(tokens, { row: this, slotIndex: slot });
    });
    this.reading = element("div", "reading");
    const side = !group.mixed ? "plain" : response.accepted ? "accepted" : "rejected";
    this.node = element("section", `row ${side}`, this.meta, ...this.slots, this.reading);
    this.name = append(
      button("response-id", null, () => onTarget(response.index)),
      { title: `Show what every token of the group does to ${response.name}` },
      group.mixed ? acceptedMark(response.accepted) : null,
      response.name,
    );
  }

  get isBuilt() {
    return this.spans[0] !== null;
  }

  /** Make the spans of both slots, in the colours given. */
  build(colourings) {
    if (this.isBuilt) return;
    const { group, response } = this;
    const entries = group.entriesOf(response);
    this.bases = entries.map((entry, position) => {
      const drawing = drawingClass(entry, response.pieces[position]);
      const marks = [
        position === response.first_wrong ? " fw" : "",
        group.isPassedOver(response.start + position) ? " clipped" : "",
        group.isOfOthers(response.start + position) ? " ms" : "",
      ];
      return drawing + marks.join("");
    });
    const texts = entries.map((entry, position) => drawnText(entry, response.pieces[position]));
    for (const [slot, container] of this.slots.entries()) {
      const spans = new Array(entries.length);
      const fragment = document.createDocumentFragment();
      for (let position = 0; position < entries.length; position++) {
        const span = Object.assign(document.createElement("span"), { token: response.start + position });
        const { lead } = response.pieces[position];
        if (lead && !entries[position].special) span.append(element("span", "lead", lead), texts[position]);
        else span.textContent = texts[position];
        spans[position] = span;
        fragment.append(span);
      }
      this.spans[slot] = spans;
      container.replaceChildren(...(response.segments ? chat(response, spans) : [fragment]));
      container.style.minHeight = "";
    }
    this.paint(colourings);
  }

  /** The text as people read it: characters whole, Markdown and LaTeX shown as what they mean. */
  read() {
    if (this.reading.childNodes.length) return;
    const entries = this.group.entriesOf(this.response).filter((entry) => !entry.special);
    this.reading.append(...richText(rawText(entries)));
  }

  /** Colour classes only: themes are CSS variables and cost nothing. */
  paint(colourings) {
    for (const [slot, { channel }] of colourings.entries()) {
      const { title } = CHANNELS[channel];
      const name = channel === "delta_v" ? title : title.toLowerCase();
      setAttributes(this.slots[slot], {
        "data-channel": name,
        "aria-label": `${this.response.name}, ${this.response.length} tokens coloured by ${name}; arrow keys walk through them`,
      });
    }
    if (!this.isBuilt) return;
    this.colourings = colourings;
    for (let position = 0; position < this.bases.length; position++) {
      for (const slot of [0, 1]) this.paintToken(slot, position);
    }
  }

  paintToken(slot, position) {
    const { channel, levels, values } = this.colourings[slot];
    const token = this.response.start + position;
    const level = levels[token];
    let name = this.bases[position];
    if (level) name += ` ${classNameOf(channel, level)}`;
    else if ((channel === "influence" || channel === "delta_v") && values !== null && Number.isNaN(values[token]))
      name += " nc";
    const flags = this.flags.get(position);
    if (flags) name += ` ${flags}`;
    const span = this.spans[slot][position];
    if (span.className !== name) span.className = name;
  }

  /** hov, sel or found, on both spans of a token. Remembered for rows that are not built yet. */
  flag(position, flag, on) {
    const flags = new Set((this.flags.get(position) ?? "").split(" ").filter(Boolean));
    if (on) flags.add(flag);
    else flags.delete(flag);
    if (flags.size) this.flags.set(position, [...flags].join(" "));
    else this.flags.delete(position);
    if (!this.isBuilt) return;
    for (const slot of [0, 1]) this.spans[slot][position]?.classList.toggle(flag, on);
    if (on && flag !== "hov") for (const slot of [0, 1]) unfold(this.spans[slot][position]);
  }

  /** Space for a row that is not built, so that jumps land where they should. */
  reserve(height) {
    this.node.style.containIntrinsicBlockSize = `auto ${height}px`;
    if (!this.isBuilt) for (const container of this.slots) container.style.minHeight = `${height}px`;
  }
}

/** Show a token that stands in a folded part. */
function unfold(span) {
  const fold = span?.closest("details");
  if (fold) fold.open = true;
}

/** Lines that a response fills when `perLine` characters fit. */
export function estimatedLines(response, perLine) {
  let lines = 0;
  let used = 0;
  for (const { text } of response.pieces) {
    if (text.startsWith("\n")) {
      lines += Math.max(1, Math.ceil(used / perLine));
      used = 0;
    } else used += text.length;
  }
  return lines + Math.max(1, Math.ceil(used / perLine));
}
