// What every page of the viewer has: its place in the application, keys, and observers that end with it.

import { element } from "./dom.js";

/** @typedef {import("./app.js").Context} Context */

export class Page {
  /**
   * @param {Context} context
   * @param {string} title
   * @param {string[][]} hints keys and what they do, for the line at the bottom
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

  /** The step of this page's instrument that is nearest to `step`. */
  openNearestStep(kind, page, step) {
    const distance = (each) => Math.abs(each - step);
    const steps = this.run.stepsOf([kind]);
    const nearest = steps.reduce((best, each) => (distance(each) < distance(best) ? each : best), steps[0]);
    this.context.go(page, { step: nearest });
  }

  destroy() {
    for (const observer of this.observers) observer.disconnect();
  }
}

/** The head of a page: a title, a sentence, and facts at the right. */
export function pageHead(title, sentence, ...right) {
  return element(
    "div",
    "head",
    element("div", "title", element("h1", "", title), element("p", "sub", sentence)),
    ...right,
  );
}

/** The element after or before `current`, clamped to the ends; the first one where `current` is not in the list. */
export function neighbourIn(list, current, direction) {
  return list[Math.max(0, Math.min(list.length - 1, list.indexOf(current) + direction))];
}
