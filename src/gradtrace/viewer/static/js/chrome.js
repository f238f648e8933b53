// The frame around every page: top bar with the run switcher and tabs, key hints, help, and light or dark.

import { append, button, element, linkTo, svgElement } from "./dom.js";
import { ago } from "./format.js";

const READING = [
  "Influence is signed and centred at 0. Positive: training on this token raised the objective. It is in nats: what this mini-batch’s gradient contributed to the optimizer step changed the token’s own term by so much, and the influence of all tokens adds up. Strong values also carry a bar, above for positive and below for negative; a dotted underline marks tokens that training passes over because they were clipped.",
  "Colours stop at the 99th percentile of the response, the group or the step, so one extreme token cannot wash out the rest. A token struck through was not captured by the trace.",
  "Measured groups also show what the whole step did: the log-prob of each token before and after it, the part of each token in its own prompt’s objective, and its effect on each response. Scores from captured factors (credit=position, hessian_mode=inverse) have no natural unit and say how they are defined.",
];

export class Chrome {
  /** actions: {move(page, direction), hrefOfRun(run), toggleOverlay(name, on), toggleTheme(), refreshRuns()} */
  constructor(actions) {
    this.actions = actions;
    this.bar = element("header", "bar");
    this.main = element("main", "page", { id: "main", tabindex: -1 });
    this.foot = element("footer", "foot", { "aria-label": "Keyboard shortcuts" });
    this.announcer = element("div", "visually-hidden", { "aria-live": "polite" });
    const onclick = (event) => {
      event.preventDefault();
      this.main.focus();
    };
    const skip = element("a", "skip-link", { href: "#main", onclick }, "Skip to content");
    this.live = element("span", "live");
    this.picker = new RunPicker(actions);
    append(document.body, skip, this.bar, this.main, this.foot, this.announcer);
  }

  announce(text) {
    this.announcer.textContent = text;
  }

  /** tabs: [{page, label, href, current, stepper}] */
  showBar(tabs, run, runs, overlays) {
    const brand = element("a", "brand", { href: tabs[0].href }, logo(), "gradtrace");
    const nav = element("nav", "tabs", { "aria-label": "Pages" });
    for (const tab of tabs) {
      nav.append(element("a", "tab", { href: tab.href, "aria-current": tab.current ? "page" : null }, tab.label));
      if (tab.current && tab.stepper) nav.append(this.stepper(tab));
    }
    this.picker.show(run, runs, overlays);
    const words = { "aria-label": "Light or dark", title: "Theme (t)" };
    const theme = button("icon", halfMoon(), this.actions.toggleTheme, words);
    this.bar.replaceChildren(brand, this.picker.node, nav, element("span", "grow"), this.live, theme);
    this.showLive(run);
  }

  stepper({ page, stepper }) {
    const step = (direction, sign, word) =>
      button("", sign, () => this.actions.move(page, direction), {
        "aria-label": `${word} ${page}`,
        disabled: stepper[word] === undefined,
      });
    return element("span", "stepper", step(-1, "‹", "previous"), step(1, "›", "next"));
  }

  showLive(run, lost = false) {
    if (!run?.state || run.isAblation || run.onlyPage) return this.live.replaceChildren();
    this.live.className = `live${run.isLive ? "" : " done"}${lost ? " lost" : ""}`;
    const words = element("span", "live-words", lost ? "server does not answer" : run.stateLine());
    this.live.replaceChildren(element("i"), words);
    if (run.isLive && run.written && !lost)
      this.live.append(element("span", "dim wide-only", ago(Date.now() / 1000 - run.written)));
  }

  showHints(hints, tail) {
    const all = Object.entries({ ...hints, t: "theme", "?": "help" });
    const shown = all.map(([keys, words]) => element("span", "hint", ...kbds(keys), element("span", "", words)));
    this.foot.replaceChildren(...shown, ...(tail ? [element("span", "tail wide-only", tail)] : []));
  }

  showHelp(hints) {
    this.dialog?.remove();
    const list = element("dl");
    for (const [keys, words] of Object.entries({ ...hints, t: "light or dark", "?": "this help" }))
      list.append(element("dt", "", ...kbds(keys)), element("dd", "", words));
    this.dialog = element(
      "dialog",
      "",
      { onclick: (event) => event.target === this.dialog && this.dialog.close() },
      element("h2", "", "Keyboard"),
      list,
      element("h2", "", "Reading the colours"),
      ...READING.map((text) => element("p", "", text)),
    );
    document.body.append(this.dialog);
    this.dialog.showModal();
  }
}

function kbds(keys) {
  return keys.split(" ").map((key) => element("kbd", "", key));
}

function logo() {
  const mark = svgElement("svg", { width: 18, height: 14, viewBox: "0 0 18 14", "aria-hidden": "true" });
  for (const [place, y] of [5, 0, 4, 8].entries())
    mark.append(svgElement("rect", { x: 5 * place, y, width: 3, height: 6, rx: 0.5 }));
  return mark;
}

function halfMoon() {
  return svgElement(
    "svg",
    { width: 15, height: 15, viewBox: "0 0 16 16", "aria-hidden": "true" },
    svgElement("circle", { cx: 8, cy: 8, r: 6.5, fill: "none", stroke: "currentColor", "stroke-width": 1.5 }),
    svgElement("path", { d: "M8 1.5a6.5 6.5 0 0 1 0 13z", fill: "currentColor" }),
  );
}

/** The menu of runs: open one, or lay others over its curves. */
class RunPicker {
  constructor(actions) {
    this.actions = actions;
    this.opener = button("", "", () => this.toggle(), {
      "aria-haspopup": "true",
      "aria-expanded": "false",
      title: "Switch or compare runs",
    });
    this.menu = element("div", "run-menu", { hidden: true });
    const onkeydown = (event) => {
      if (event.key !== "Escape" || this.menu.hidden) return;
      event.stopPropagation();
      this.toggle(false);
      this.opener.focus();
    };
    this.node = element("div", "run-picker", { onkeydown }, this.opener, this.menu);
    document.addEventListener("click", (event) => {
      if (!this.menu.hidden && !this.node.contains(/** @type {Node} */ (event.target))) this.toggle(false);
    });
  }

  toggle(open = this.menu.hidden) {
    this.menu.hidden = !open;
    this.opener.setAttribute("aria-expanded", String(open));
    if (open) this.actions.refreshRuns();
  }

  show(run, runs, overlays) {
    this.opener.textContent = `${run?.name ?? "no run"}${overlays.length ? ` +${overlays.length}` : ""} ▾`;
    const items = runs.map((each) => this.item(each, run, overlays));
    this.menu.replaceChildren(...items);
    if (runs.length > 1) this.menu.append(element("p", "", "Tick runs to lay their curves over the open one."));
  }

  item(each, run, overlays) {
    const isOpen = each.id === run?.id;
    const link = append(linkTo(this.actions.hrefOfRun(each), "", element("b", "", each.name)), {
      "aria-current": isOpen ? "true" : null,
      onclick: () => this.toggle(false),
    });
    link.append(element("span", "", `${each.state}, ${each.traced_steps} traced steps`));
    if (isOpen) return element("div", "item", link, element("span", "dim", "open"));
    const box = element("input", "", {
      type: "checkbox",
      "aria-label": `compare with ${each.name}`,
      checked: overlays.includes(each.name),
      onchange: () => this.actions.toggleOverlay(each.name, box.checked),
    });
    return element("div", "item", link, element("label", "", box, "compare"));
  }
}

const system = matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    return localStorage.getItem("gradtrace-theme");
  } catch {
    return null; // a sandboxed frame has no storage
  }
}

export function applyTheme(onChange) {
  const apply = () => {
    document.documentElement.dataset.theme = stored() ?? (system.matches ? "dark" : "light");
    onChange();
  };
  apply();
  system.addEventListener("change", apply);
}

export function flipTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("gradtrace-theme", theme);
  } catch {
    // it then lasts until the page is closed
  }
}
