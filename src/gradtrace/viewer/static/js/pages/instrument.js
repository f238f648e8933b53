// The page of any instrument that has none of its own: its responses with all their numbers, and their tokens coloured
// by whatever it stores per token. What the columns mean comes from the instrument's record.

import { Sorting } from "../controls.js";
import { element, factList, tableOf } from "../dom.js";
import { MISSING, general, numberStyle, plural } from "../format.js";
import { rampParts } from "../group/legend.js";
import { ResponseList, ResponseTexts, readTokens } from "../scores/responses.js";
import { blameReport } from "../scores/summary.js";
import { Page, opensInstrument, pageHead } from "./page.js";

const MOST_FACTS = 5;

const HINTS = { "j k": "response", "↵": "open it", "[ ]": "step" };

class InstrumentPage extends Page {
  constructor(context, path, structure) {
    super(context, `${structure.label}, step ${structure.step}`, HINTS, "instrument-page");
    const { label, meaning, step, responses, groups, meta, columns, channels, report } = structure;
    this.structure = structure;
    this.channels = Object.fromEntries(channels.map((each) => [each.name, { ...each, title: each.heading }]));
    this.colour = this.url.choice("colour", Object.keys(this.channels)) ?? null;
    this.numeric = new Set(columns.map(({ name }) => name).filter((name) => typeof responses[0]?.[name] === "number"));
    const [firstNumber = "reward"] = this.numeric;
    this.sorting = new Sorting(this.url, this.heads(), firstNumber, () => this.draw());
    this.legend = element("div", "instrument-legend");
    this.list = new ResponseList({
      url: this.url,
      groups,
      texts: new ResponseTexts(context.source, path, this.channels),
      width: 3 + columns.length,
      cells: (row) => this.cells(row),
      opened: (_, whole) => [whole.promptNode(), whole.map(this.colour, this.channels[this.colour]?.top)],
    });
    const numbers = meta.filter((each) => typeof each.value === "number").slice(0, MOST_FACTS);
    const facts = numbers.map(({ name, value, meaning: hint }) => [
      general(value),
      name.replaceAll("_", " "),
      hint || null,
    ]);
    this.node.append(
      pageHead(`${label}, step ${step}`, `${plural(responses.length, "response")}: ${meaning}.`, factList(...facts)),
      ...(report ? [blameReport(report)] : []),
      this.controls(),
      this.legend,
      tableOf("fixed responses", this.sorting.row, this.list.node),
    );
    this.draw();
    readTokens(this.node);
  }

  heads() {
    const columns = this.structure.columns.map(({ name, heading, meaning, unit }) => ({
      key: name,
      title: heading,
      number: this.numeric.has(name),
      hint: unit ? `${meaning} [${unit}]` : meaning,
    }));
    return [
      { key: "prompt", title: "Prompt", fixed: true },
      { key: "text", title: "Response", fixed: true },
      { key: "reward", title: "Reward", number: true },
      ...columns,
    ];
  }

  controls() {
    const { channels } = this.structure;
    if (channels.length < 2) return element("div");
    const options = Object.fromEntries(channels.map(({ name, heading }) => [name, heading]));
    return element(
      "div",
      "controls",
      this.choiceOf("Colour", "colour", options, () => this.draw()),
    );
  }

  draw() {
    this.drawLegend();
    const number = (row, key) => row[key];
    this.list.draw(this.sorting.sorted(this.structure.responses, number, (a, b) => a.response - b.response));
  }

  drawLegend() {
    const channel = this.channels[this.colour];
    if (!channel) return;
    const top = channel.top ?? 0;
    const style = numberStyle(top, 2);
    const [low, high] = channel.signed ? [style.signed(-top), style.signed(top)] : ["0", style.plain(top)];
    const ramp = element("div", "ramp", ...rampParts(channel, low, "", `${high} ${channel.unit}`));
    this.legend.replaceChildren(element("p", "dim", `Colour of an open response: ${channel.meaning}.`), ramp);
  }

  /** The instrument's own numbers of a response. */
  cells(row) {
    return this.structure.columns.map(({ name, signed }) => {
      const value = row[name];
      if (value === null) return [this.numeric.has(name) ? "number" : "", MISSING];
      if (!this.numeric.has(name)) return String(value);
      return ["number", signed ? numberStyle(Math.abs(value)).signed(value) : general(value)];
    });
  }

  get actions() {
    return { ...this.list.actions, Escape: () => this.list.select(null) };
  }
}

export const openInstrumentPage = opensInstrument(InstrumentPage);
