// What every page has: its place in the application, keys and observers; and the pages that say why there is nothing.

import { ChartGrid } from "../charts.js";
import { segmentedControl } from "../controls.js";
import { element, emptyState, linkTo } from "../dom.js";

/** @typedef {import("../app.js").Context} Context */

export class Page {
  /**
   * @param {Context} context
   * @param {string} title
   * @param {Record<string, string>} hints keys and what they do, for the line at the bottom
   * @param {string} [className]
   */
  constructor(context, title, hints, className = "") {
    this.context = context;
    this.run = context.run;
    this.url = context.url;
    this.title = title;
    this.hints = hints;
    this.node = element("div", className);
    /** @type {{disconnect(): void}[]} */
    this.observers = [];
  }

  /**
   * What the keys do here, by their names. An action that returns false did nothing.
   * @returns {Record<string, () => unknown>}
   */
  get actions() {
    return {};
  }

  /** True if the key meant something here. */
  key(event) {
    const action = this.actions[event.key];
    return action !== undefined && action() !== false;
  }

  /** A control of something that this page shows by: kept under its name, here and in the address. */
  choiceOf(label, name, options, draw) {
    const onChange = (value) => {
      this[name] = value;
      this.url.update({ [name]: value });
      draw();
    };
    return segmentedControl({ label, value: this[name], options, onChange });
  }

  /** Draw, and again whenever the width of a node changes. */
  drawToWidth(node, draw) {
    draw();
    let width = node.clientWidth;
    const observer = new ResizeObserver(() => {
      if (node.clientWidth === width) return;
      width = node.clientWidth;
      draw();
    });
    observer.observe(node);
    this.observers.push(observer);
  }

  /** Curves over training, the crosshair at `step`; a click opens this page at the step of its instrument nearest to it. */
  stepCharts(kind, step, specs) {
    const charts = new ChartGrid([this.run, ...this.context.overlays], (clicked) => {
      const distance = (each) => Math.abs(each - clicked);
      const [nearest] = this.run.stepsOf([kind]).sort((a, b) => distance(a) - distance(b));
      this.context.go(this.context.page, { step: nearest });
    });
    charts.show(specs);
    charts.step = charts.rest = step;
    return charts;
  }

  destroy() {
    for (const observer of this.observers) observer.disconnect();
  }
}

/** What opens the page of an instrument: it gets what the server has of its step. */
export function opensInstrument(PageClass) {
  return async (context) => {
    const path = `runs/${context.run.id}/steps/${context.step}/${context.page}`;
    const structure = await context.source.json(path);
    return () => new PageClass(context, path, structure);
  };
}

/** The head of a page: a title, a sentence, and facts at the right. */
export function pageHead(title, sentence, ...right) {
  const words = element("div", "title", element("h1", "", title), element("p", "sub", sentence));
  return element("div", "head", words, ...right);
}

/** What of a step or a run cannot be read. */
export function problemNotes({ problems }, before = "") {
  return problems.map((problem) => element("p", "notice problem", before + problem));
}

/** The element after or before `current`, clamped to the ends; the first one where `current` is not in the list. */
export function neighbourIn(list, current, direction) {
  return list[Math.max(0, Math.min(list.length - 1, list.indexOf(current) + direction))];
}

export function failurePage(error, context) {
  const titles = { 422: `Step ${context?.step ?? ""} cannot be read`, 404: "Not there" };
  const title = titles[error.status] ?? "Something went wrong";
  const rest = error.status === 422 ? "The other steps are not affected. Use [ and ] to go to them." : "";
  if (error.status === undefined) console.error(error);
  return { node: emptyState("h1", title, String(error.message), rest), title: "problem" };
}

/** A page that is drawn again when there is news. */
function waitingPage(name, title, ...paragraphs) {
  return { node: emptyState("h1", title, ...paragraphs), title: name, waiting: true };
}

export function noRunPage(named) {
  if (named) return waitingPage("no run", "No run", `There is no run called “${named}” here.`);
  return waitingPage("no run", "No run", "There is no run here yet. `gradtrace train` makes one.");
}

const STILL_WRITING = "The first step is still being written. This page opens by itself when it is there.";

export function noTracePage(run) {
  const switches = run.instruments.filter(({ page }) => page === null).map((each) => each.switch);
  if (run.tokenKinds.every((kind) => run.enabled[kind] === false))
    return waitingPage(
      "no trace",
      "Tracing was off in this run",
      `Start it with ${switches.join(" ")} to see its tokens.`,
    );
  return waitingPage("no trace", "No traced step yet", run.isLive ? STILL_WRITING : "This run has no traced step.");
}

export function noInstrumentPage(run, { kind, label, switch: setting }) {
  if (!run.traces[kind].present && run.enabled[kind] !== true)
    return waitingPage("no trace", `${label} was off in this run`, `Start a run with ${setting} to see this page.`);
  return waitingPage("no trace", "Nothing written yet", run.isLive ? STILL_WRITING : "This run has no step of it.");
}

export function untracedStepPage(run, steps, step, isServer, href) {
  const nearest = [steps.findLast((each) => each < step), steps.find((each) => each > step)];
  const known = nearest.filter((each) => each !== undefined);
  const links = known.flatMap((each) => [linkTo(href({ step: each }), "link-button", `step ${each}`), " "]);
  const ahead = run.isLive && step > run.lastStep;
  const text = !isServer
    ? `This report does not hold step ${step}. It holds:`
    : ahead
      ? `Step ${step} has not been written yet; this page opens by itself when it is.`
      : `Step ${step} was not traced (write_every), or its trace is still being written. The nearest traced steps:`;
  return waitingPage(`step ${step}`, `No trace of step ${step}`, text, element("p", "", ...links));
}
