// The page of any instrument that has none of its own: its responses with all their numbers, and their tokens coloured
// by whatever it stores per token. What the columns mean comes from the instrument's record.

import { append, element, fact, tableOf } from "../dom.js";
import { general, MISSING, numberStyle, plural } from "../format.js";
import { opensInstrument, Page, pageHead } from "../page.js";
import { rampParts } from "../group/legend.js";
import { blameReport } from "../scores/blame_report.js";
import { ResponseList } from "../scores/response_list.js";
import { readTokens, ResponseTexts } from "../scores/response_text.js";
import { Sorting } from "../sorting.js";

const MOST_FACTS = 5;

const HINTS = { "j k": "response", "↵": "open it", "[ ]": "step" };

class InstrumentPage extends Page {
  constructor(context, path, structure) {
    super(context, `${structure.label}, step ${structure.step}`, HINTS, "instrument-page");
    this.structure = structure;
    this.channels = new Map(structure.channels.map((channel) => [channel.name, channel]));
    this.colour = this.url.choice("colour", [...this.channels.keys()]) ?? null;
    const described = Object.fromEntries(
      structure.channels.map((each) => [each.name, { ...each, title: each.heading }]),
    );
    this.texts = new ResponseTexts(context.source, path, described);
    this.numeric = structure.columns.filter(({ name }) => typeof structure.responses[0]?.[name] === "number");
    this.build();
    readTokens(this.node);
  }

  build() {
    const { label, meaning, step, responses, meta, columns } = this.structure;
    const sentence = `${plural(responses.length, "response")}: ${meaning}.`;
    const numbers = meta.filter((each) => typeof each.value === "number").slice(0, MOST_FACTS);
    const facts = numbers.map(({ name, value, meaning: title }) =>
      append(fact(general(value), name.replaceAll("_", " ")), { title: title || null }),
    );
    this.node.append(pageHead(`${label}, step ${step}`, sentence, element("div", "facts", ...facts)));
    if (this.structure.report) this.node.append(blameReport(this.structure.report));
    this.sorting = new Sorting(
      this.url,
      [
        { key: "prompt", title: "Prompt", fixed: true },
        { key: "text", title: "Response", fixed: true },
        { key: "reward", title: "Reward", number: true },
        ...columns.map(({ name, heading, meaning: words, unit }) => ({
          key: name,
          title: heading,
          number: this.isNumeric(name),
          hint: unit ? `${words} [${unit}]` : words,
        })),
      ],
      this.numeric[0]?.name ?? "reward",
      () => this.draw(),
    );
    this.legend = element("div", "instrument-legend");
    this.list = new ResponseList({
      url: this.url,
      groups: this.structure.groups,
      texts: this.texts,
      width: 3 + columns.length,
      cells: (row) => this.cells(row),
      opened: (_, whole) => [whole.promptNode(), whole.map(this.colour, this.channels.get(this.colour)?.top)],
    });
    const list = tableOf("fixed responses", this.sorting.row, this.list.node);
    this.node.append(this.controls(), this.legend, list);
    this.draw();
  }

  isNumeric(name) {
    return this.numeric.some((column) => column.name === name);
  }

  controls() {
    if (this.channels.size < 2) return element("div");
    const options = Object.fromEntries(this.structure.channels.map(({ name, heading }) => [name, heading]));
    const colours = this.choiceOf("Colour", "colour", options, () => this.draw());
    return element("div", "controls", colours);
  }

  draw() {
    this.drawLegend();
    const { key } = this.sorting;
    const rows = [...this.structure.responses].sort(
      (a, b) => this.sorting.compare(a[key], b[key]) || a.response - b.response,
    );
    this.list.draw(rows);
  }

  drawLegend() {
    const channel = this.channels.get(this.colour);
    if (!channel) return this.legend.replaceChildren();
    const top = channel.top ?? 0;
    const style = numberStyle(top, 2);
    const [low, high] = channel.signed ? [style.signed(-top), style.signed(top)] : ["0", style.plain(top)];
    const parts = rampParts(channel.signed ? "influence" : "entropy", low, "", `${high} ${channel.unit}`);
    const ramp = element("div", "ramp", ...parts);
    return this.legend.replaceChildren(element("p", "dim", `Colour of an open response: ${channel.meaning}.`), ramp);
  }

  /** The instrument's own numbers of a response. */
  cells(row) {
    return this.structure.columns.map(({ name, signed }) => {
      const value = row[name];
      if (!this.isNumeric(name)) return element("td", "", value === null ? MISSING : String(value));
      const text = value === null ? MISSING : signed ? numberStyle(Math.abs(value)).signed(value) : general(value);
      return element("td", "number", text);
    });
  }

  get actions() {
    return { ...this.list.actions, Escape: () => this.list.select(null) };
  }
}

export const openInstrumentPage = opensInstrument(InstrumentPage);
