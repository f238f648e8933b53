// What every page of the viewer has: its place in the application, keys, and observers that end with it.

import { ChartGrid } from "./chart_grid.js";
import { segmentedControl } from "./controls.js";
import { element } from "./dom.js";

/** @typedef {import("./app.js").Context} Context */

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

  /** Draw again whenever the width of a node changes. */
  watchWidth(node, draw) {
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
      const steps = this.run.stepsOf([kind]);
      const nearest = steps.reduce((best, each) => (distance(each) < distance(best) ? each : best), steps[0]);
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

/** The element after or before `current`, clamped to the ends; the first one where `current` is not in the list. */
export function neighbourIn(list, current, direction) {
  return list[Math.max(0, Math.min(list.length - 1, list.indexOf(current) + direction))];
}
