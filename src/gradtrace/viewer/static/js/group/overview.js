// The group in miniature: one line per response above the rows, and one cell per response at the right edge.

import { CHANNELS } from "../channels.js";
import { levelName, rampOf } from "../colours.js";
import { button, cssColours, element, fitCanvas, setAttributes } from "../dom.js";
import { largestSize } from "../statistics.js";

const LINE = 9;
const THICKNESS = 7;
const SECTION_GAP = 6;
const LEFT = 12;

export class Overview {
  constructor(group, onJump) {
    this.group = group;
    this.lines = [];
    this.longest = largestSize(
      group.responses.map((response) => response.length),
      1,
    );
    const words = { role: "img", "aria-label": "Overview of the group; the same colours as below" };
    const onclick = (event) => this.jump(event, onJump);
    this.canvases = [0, 1].map((slot) => element("canvas", `slot-${slot}`, { ...words, onclick }));
    const caption = element("div", "caption", "Overview: one line per response, one tick per token. Click to jump.");
    this.node = element("div", "overview", caption, ...this.canvases);
  }

  jump(event, onJump) {
    const line = this.lines.find(({ top }) => event.offsetY < top + LINE);
    if (!line) return;
    const share = Math.max(0, (event.offsetX - LEFT) / (event.target.clientWidth - LEFT));
    const position = Math.min(line.response.length - 1, Math.floor(share * this.longest));
    onJump(line.response.index, position);
  }

  /** order: responses from top to bottom. */
  draw(order, colourings) {
    let height = 0;
    this.lines = order.map((response, index) => {
      if (index && order[index - 1].accepted !== response.accepted) height += SECTION_GAP;
      height += LINE;
      return { response, top: height - LINE };
    });
    for (const [slot, canvas] of this.canvases.entries()) this.drawSlot(canvas, height, colourings[slot]);
  }

  drawSlot(canvas, height, { channel, levels }) {
    const width = canvas.clientWidth;
    if (!width) return;
    const context = fitCanvas(canvas, width, height);
    const look = CHANNELS[channel];
    const colours = cssColours("bg2", "ink", "ink3", ...rampOf(look));
    for (const { response, top } of this.lines) {
      drawMark(context, top, response.accepted, colours);
      const unit = (width - LEFT) / this.longest;
      context.fillStyle = colours.bg2;
      context.fillRect(LEFT, top, response.length * unit, THICKNESS);
      const own = levels.subarray(response.start, response.end);
      drawTicks(context, top, unit, own, (level) => colours[levelName(look, level)]);
    }
  }
}

function drawMark(context, top, accepted, colours) {
  context.beginPath();
  context.arc(3.5, top + 3.5, accepted ? 2.6 : 2.2, 0, 7);
  context.fillStyle = colours.ink;
  context.strokeStyle = colours.ink3;
  if (accepted) context.fill();
  else context.stroke();
}

/** Weak ticks first: where tokens are narrower than a pixel the strong ones stay visible. */
function drawTicks(context, top, unit, levels, colourOf) {
  for (let strength = 1; strength <= 6; strength++) {
    for (let position = 0; position < levels.length; position++) {
      if (Math.abs(levels[position]) !== strength) continue;
      context.fillStyle = colourOf(levels[position]);
      context.fillRect(LEFT + position * unit, top, Math.max(1, unit), THICKNESS);
    }
  }
}

export class Rail {
  constructor(group, onJump) {
    this.node = element("nav", "rail", { "aria-label": "Responses of this group" });
    this.cells = group.responses.map((response) => {
      const cell = button("", response.name, () => onJump(response.index));
      return Object.assign(cell, { response });
    });
  }

  makeRoom(height) {
    this.node.style.setProperty("--dock", `${height}px`);
  }

  place(order) {
    this.node.replaceChildren(...order.map((response) => this.cells[response.index]));
  }

  /** tint: class name per response or null; say: words per response. */
  show(current, tint = null, say = null) {
    for (const cell of this.cells) {
      const { index, accepted, name } = cell.response;
      const names = [accepted ? "accepted" : "rejected", index === current ? "current" : "", tint?.[index] ?? ""];
      cell.className = names.join(" ").trim();
      const words = `${name}, ${accepted ? "accepted" : "rejected"}${say ? `, ${say[index]}` : ""}`;
      setAttributes(cell, { title: words, "aria-label": words, "aria-current": index === current ? "true" : null });
    }
  }
}
