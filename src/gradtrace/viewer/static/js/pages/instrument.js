// The page of any instrument that has none of its own: its responses with all their numbers, and their tokens coloured
// by whatever it stores per token. What the columns mean comes from the instrument's record.

import { rampOf } from "../channels.js";
import { segmentedControl } from "../controls.js";
import { acceptedMark, element, fact, setAttributes } from "../dom.js";
import { fixed, general, MISSING, numberStyle, plural, sharedStart } from "../format.js";
import { neighbourIn, Page, pageHead } from "../page.js";
import { readTokens, ResponseTexts } from "../scores/response_text.js";
import { Sorting, wideRow } from "../sorting.js";

const MOST_ROWS = 60;
const MOST_FACTS = 5;

export async function openInstrumentPage(context) {
  const path = `runs/${context.run.id}/steps/${context.step}/${context.page}`;
  const structure = await context.source.json(path);
  return () => new InstrumentPage(context, path, structure);
}

/** @type {[string, string][]} */
const HINTS = [
  ["j k", "response"],
  ["[ ]", "step"],
];

class InstrumentPage extends Page {
  constructor(context, path, structure) {
    super(context, `${structure.label}, step ${structure.step}`, HINTS, "instrument-page");
    this.structure = structure;
    this.channels = new Map(structure.channels.map((channel) => [channel.name, channel]));
    this.channel = this.url.choice("colour", [...this.channels.keys()]) ?? null;
    this.selected = this.url.number("sel");
    const described = structure.channels.map(({ name, heading, signed, unit }) => [
      name,
      { title: heading, signed, unit },
    ]);
    this.texts = new ResponseTexts(context.source, path, Object.fromEntries(described));
    const cut = sharedStart(structure.groups.map((group) => group.text));
    for (const group of structure.groups) group.text = group.text.slice(cut);
    this.numeric = structure.columns.filter(({ name }) => typeof structure.responses[0]?.[name] === "number");
    this.build();
    readTokens(this.node);
  }

  build() {
    const { label, meaning, step, responses, meta, columns } = this.structure;
    const sentence = `${plural(responses.length, "response")}: ${meaning}.`;
    const facts = element("div", "facts");
    for (const { name, value, meaning: words } of meta
      .filter((each) => typeof each.value === "number")
      .slice(0, MOST_FACTS))
      facts.append(setAttributes(fact(general(value), name.replaceAll("_", " ")), { title: words || null }));
    this.node.append(pageHead(`${label}, step ${step}`, sentence, facts));
    this.sorting = new Sorting(
      this.url,
      [
        { key: "prompt", title: "Prompt", fixed: true },
        { key: "text", title: "Response", fixed: true },
        { key: "reward", title: "Reward", number: true },
        ...columns.map(({ name, heading }) => ({ key: name, title: heading, number: this.isNumeric(name) })),
      ],
      this.numeric[0]?.name ?? "reward",
      () => this.draw(),
    );
    for (const [index, { meaning: words, unit }] of columns.entries())
      this.sorting.row.children[index + 3].setAttribute("title", unit ? `${words} [${unit}]` : words);
    this.legend = element("div", "instrument-legend");
    this.body = element("tbody");
    this.node.append(
      this.controls(),
      this.legend,
      element("table", "fixed responses", element("thead", "", this.sorting.row), this.body),
    );
    this.draw();
  }

  isNumeric(name) {
    return this.numeric.some((column) => column.name === name);
  }

  controls() {
    if (this.channels.size < 2) return element("div");
    const control = segmentedControl({
      label: "Colour",
      value: this.channel,
      options: [...this.channels.values()].map(({ name, heading }) => ({ value: name, label: heading })),
      onChange: (name) => {
        this.channel = name;
        this.url.update({ colour: name });
        this.draw();
      },
    });
    return element("div", "controls", control);
  }

  draw() {
    this.drawLegend();
    const { key } = this.sorting;
    const rows = [...this.structure.responses].sort(
      (a, b) => this.sorting.compare(a[key], b[key]) || a.response - b.response,
    );
    this.visible = rows.slice(0, MOST_ROWS);
    const picked = rows.find((row) => row.response === this.selected);
    if (picked && !this.visible.includes(picked)) this.visible.push(picked);
    this.body.replaceChildren();
    for (const row of this.visible) {
      this.body.append(this.row(row));
      if (row.response === this.selected) this.body.append(this.openRow(row));
    }
    const hidden = rows.length - this.visible.length;
    if (hidden > 0) this.body.append(wideRow("between", this.width, `${hidden} more`));
  }

  get width() {
    return 3 + this.structure.columns.length;
  }

  drawLegend() {
    const channel = this.channels.get(this.channel);
    if (!channel) return this.legend.replaceChildren();
    const top = channel.top ?? 0;
    const style = numberStyle(top, 2);
    const ramp = element(
      "div",
      "ramp",
      ...rampOf(channel.signed ? "influence" : "entropy").map((name) => element("i", name)),
    );
    ramp.append(
      element("b", "low", channel.signed ? style.signed(-top) : "0"),
      element("b", "high", `${channel.signed ? style.signed(top) : style.plain(top)} ${channel.unit}`),
    );
    return this.legend.replaceChildren(element("p", "dim", `Colour of an open response: ${channel.meaning}.`), ramp);
  }

  row(row) {
    const cells = this.structure.columns.map(({ name, signed }) => {
      const value = row[name];
      if (!this.isNumeric(name)) return element("td", "", value === null ? MISSING : String(value));
      const text = value === null ? MISSING : signed ? numberStyle(Math.abs(value)).signed(value) : general(value);
      return element("td", "number", text);
    });
    const isOpen = row.response === this.selected;
    const node = setAttributes(
      element(
        "tr",
        `opens${isOpen ? " current" : ""}`,
        element("td", "c-prompt mono", this.structure.groups[row.group].text),
        element("td", "c-text mono", row.accepted === null ? null : acceptedMark(row.accepted), " ", row.text),
        element("td", "number", fixed(row.reward, 2)),
        ...cells,
      ),
      { "data-response": row.response, "aria-expanded": String(isOpen) },
    );
    node.addEventListener("click", () => this.select(isOpen ? null : row.response));
    return node;
  }

  openRow(row) {
    const node = wideRow("opened", this.width, element("p", "dim", "Loading …"));
    const cell = node.children[0];
    this.texts
      .get(row.response)
      .then((whole) =>
        cell.replaceChildren(whole.promptNode(), whole.map(this.channel, this.channels.get(this.channel)?.top)),
      )
      .catch((error) => cell.replaceChildren(element("p", "dim", `${error.message} Its beginning: ${row.text}`)));
    return node;
  }

  select(response) {
    this.selected = response;
    this.url.update({ sel: response });
    this.draw();
    this.body.querySelector("tr.current")?.scrollIntoView({ block: "nearest" });
  }

  move(direction) {
    const current = this.visible.find((row) => row.response === this.selected);
    const next = neighbourIn(this.visible, current, direction);
    if (next) this.select(next.response);
  }

  get actions() {
    return { j: () => this.move(1), k: () => this.move(-1), Escape: () => this.select(null) };
  }
}
