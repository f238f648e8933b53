// The application: which run, page, step and group the address names, and keeping them up to date.

import { Chrome, applyTheme, flipTheme } from "./chrome.js";
import { element } from "./dom.js";
import { openAblationPage } from "./pages/ablation.js";
import { openFindPage } from "./pages/find.js";
import { openFindingsPage } from "./pages/findings.js";
import { openGroupPage } from "./pages/group.js";
import { openInstrumentPage } from "./pages/instrument.js";
import { failurePage, noInstrumentPage, noRunPage, noTracePage, untracedStepPage } from "./pages/page.js";
import { openProbePage } from "./pages/probe.js";
import { openRunPage } from "./pages/run.js";
import { openStepPage } from "./pages/step.js";
import { openTokensPage } from "./pages/tokens.js";
import { openTracinPage } from "./pages/tracin.js";
import { RunHistory } from "./source.js";
import { UrlState } from "./url_state.js";

/** Pages of the whole run, which need no traced step. */
const RUN_PAGES = { run: openRunPage, ablation: openAblationPage, find: openFindPage, findings: openFindingsPage };
const PAGES = {
  ...RUN_PAGES,
  step: openStepPage,
  group: openGroupPage,
  tokens: openTokensPage,
  tracin: openTracinPage,
  probe: openProbePage,
};
/** Choices that follow the reader from page to page; the rest (selection, search, sorting) belongs to one page. */
const CARRIED = "run with step group view left right scale score order spaces smooth chart".split(" ");
/** "with=" nothing: otherwise the runs of the command line would come back. */
const NO_OVERLAY = " ";
const LIVE_POLL = 2000;
const QUIET_POLL = 10000;
const SLOW_LOAD = 200;

/**
 * What a page gets to know: where it is, and how to go elsewhere.
 * @typedef {{
 *   page: string, run: RunHistory, overlays: RunHistory[], step: number | null, group: number | null,
 *   groups: number[] | null, source: any, url: UrlState, instruments: import("./source.js").Instrument[],
 *   announce(text: string): void, fail(error: Error): void,
 *   go(page: string, changes?: object): void, href(page: string, changes?: object): string,
 * }} Context
 */

export class App {
  constructor(source) {
    this.source = source;
    this.url = new UrlState();
    this.histories = new Map();
    // Empty until the server has answered: the address may change before that.
    this.runs = [];
    this.defaultRuns = [];
    /** @type {import("./source.js").Instrument[]} */
    this.instruments = [];
    this.ticket = 0;
    this.page = null;
    this.context = null;
  }

  async start() {
    this.chrome = new Chrome({
      move: (page, direction) => this.move(page, direction),
      hrefOfRun: (run) => this.url.href("run", ["with", "smooth", "chart"], { run: run.name }),
      toggleOverlay: (name, on) => this.toggleOverlay(name, on),
      toggleTheme: () => this.toggleTheme(),
      refreshRuns: () => this.refreshRuns().catch(() => null),
    });
    applyTheme(() => this.page?.retheme?.());
    addEventListener("hashchange", () => this.render());
    addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("click", (event) => this.followLink(event));
    try {
      await this.refreshRuns();
    } catch (error) {
      return this.showFailure(error);
    }
    await this.render();
    if (this.source.isLive) this.pollLater();
  }

  async refreshRuns() {
    const { runs, default: chosen, instruments } = await this.source.json("runs");
    this.runs = runs;
    this.defaultRuns = chosen;
    this.instruments = instruments;
    if (this.context) this.showBar(this.context);
  }

  /* ---------- which run, step, group ---------- */

  /** The instrument whose page this is; undefined for the pages of the run itself. */
  instrumentOf(page) {
    return this.instruments.find((each) => each.page === page);
  }

  /** The kinds of trace whose steps a page shows. */
  kindsOf(page) {
    const instrument = this.instrumentOf(page);
    return this.instruments
      .filter((each) => (instrument ? each === instrument : each.page === null))
      .map(({ kind }) => kind);
  }

  isPage(page) {
    return page in PAGES || this.instrumentOf(page) !== undefined;
  }

  async history(run) {
    if (!this.histories.has(run.id)) {
      const history = new RunHistory(this.source, run.id, run.name, this.instruments);
      await history.refresh();
      this.histories.set(run.id, history);
    }
    return this.histories.get(run.id);
  }

  async resolve() {
    const { page } = this.url.read();
    const named = this.url.get("run");
    const open =
      this.runs.find((run) => run.name === named) ??
      (named === null ? this.runs.find((run) => run.id === this.defaultRuns[0]) : null);
    if (!open) return { page, run: null, named };
    const others = this.overlaysOf(open);
    const [run, ...overlays] = await Promise.all([open, ...others].map((each) => this.history(each)));
    const only = run.isAblation ? "ablation" : run.onlyPage;
    const known = only ?? (this.isPage(page) ? page : "run");
    const step = this.resolveStep(run, known);
    return {
      page: known,
      run,
      overlays,
      step,
      group: this.url.number("group"),
      source: this.source,
      url: this.url,
      instruments: this.instruments,
      announce: (text) => this.chrome.announce(text),
      fail: (error) => this.showFailure(error),
      go: (target, changes) => this.go(target, changes),
      href: (target, changes) => this.url.href(target, CARRIED, changes),
      groups: this.source.groupsOf(run.id, step),
    };
  }

  /** Runs to lay over this one: those in the address; several named on the command line are compared from the start. */
  overlaysOf(open) {
    const names = this.url.read().parameters.has("with") ? this.url.getAll("with") : null;
    const chosen = names
      ? names.map((name) => this.runs.find((run) => run.name === name))
      : this.defaultRuns.map((id) => this.runs.find((run) => run.id === id));
    const isCompared = names !== null || this.defaultRuns.includes(open.id);
    return isCompared ? chosen.filter((run) => run && run.id !== open.id) : [];
  }

  /** The step in the address, else the newest one with influence, else the newest one that the page can show. */
  resolveStep(run, page) {
    const asked = this.url.number("step");
    if (asked !== null) return asked;
    if (this.instrumentOf(page)) return run.stepsOf(this.kindsOf(page)).at(-1) ?? null;
    const influence = run.stepsOf(["influence_trace"]);
    return (influence.length ? influence : run.tracedSteps).at(-1) ?? null;
  }

  /** The group in the address, else the first one that was scored. */
  async resolveGroup(context) {
    if (context.group !== null) return;
    const { groups } = await this.source.json(`runs/${context.run.id}/steps/${context.step}`);
    const there = context.groups ? groups.filter((group) => context.groups.includes(group.group)) : groups;
    context.group = (there.find((group) => group.status === "scored") ?? there[0])?.group ?? 0;
  }

  /* ---------- drawing ---------- */

  async render() {
    const ticket = ++this.ticket;
    const loading = setTimeout(
      () => ticket === this.ticket && this.show({ node: element("p", "loading", "Loading …"), title: "loading" }),
      SLOW_LOAD,
    );
    let page;
    let context = null;
    try {
      context = await this.resolve();
      page = await this.makePage(context);
    } catch (error) {
      page = failurePage(error, context);
    }
    clearTimeout(loading);
    if (ticket !== this.ticket) return;
    if (context?.run) {
      this.context = context;
      this.showBar(context);
    }
    this.show(page);
  }

  async makePage(context) {
    if (!context.run) return noRunPage(context.named);
    const { page, run, step } = context;
    if (!(page in RUN_PAGES)) {
      const steps = run.stepsOf(this.kindsOf(page));
      const instrument = this.instrumentOf(page);
      if (!steps.length) return instrument ? noInstrumentPage(run, instrument) : noTracePage(run);
      if (!steps.includes(step))
        return untracedStepPage(run, steps, step, this.source.isLive, (changes) => context.href(page, changes));
      if (page === "group") await this.resolveGroup(context);
    }
    const make = await (PAGES[page] ?? openInstrumentPage)(context);
    return make();
  }

  show(page) {
    this.page?.destroy?.();
    this.page = page;
    this.chrome.main.replaceChildren(page.node);
    scrollTo(0, 0);
    this.chrome.showHints(page.hints ?? {}, page.tail);
    document.title = `${page.title}${this.context ? ` · ${this.context.run.name}` : ""} · gradtrace`;
    page.mounted?.();
  }

  showBar(context) {
    const { run, page, step, group } = context;
    const href = (target) =>
      this.url.href(target, CARRIED, {
        step: nearestStep(run.stepsOf(this.kindsOf(target)), step),
        group,
        run: run.name,
      });
    const tabs = [];
    const add = (target, label, moves = null) => {
      const current = target === page;
      tabs.push({
        page: target,
        label,
        href: href(target),
        current,
        stepper: moves && this.neighbours(moves, context),
      });
    };
    if (!run.isAblation && !run.onlyPage) {
      add("run", "Run");
      add("step", step === null ? "Step" : `Step ${step}`, "step");
      add("group", group === null ? "Group" : `Group ${group}`, "group");
      add("tokens", "Tokens", "step");
      if (this.source.isLive) add("find", "Find");
    }
    for (const { kind, label, page: own } of this.instruments)
      if (own !== null && (run.traces[kind].present || page === own)) add(own, label, "step");
    if (run.findings > 0 || page === "findings") add("findings", `Findings ${run.findings}`);
    if (run.ablation > 0) add("ablation", "Ablation");
    const overlays = context.overlays.map((each) => each.name);
    this.chrome.showBar(tabs, run, this.runs, overlays);
  }

  showFailure(error) {
    this.show(failurePage(error, this.context));
  }

  toggleTheme() {
    flipTheme();
    this.page?.retheme?.();
  }

  /* ---------- moving about ---------- */

  go(page, changes = {}) {
    this.open(this.url.href(page, CARRIED, changes));
  }

  open(hash) {
    if (this.url.fallback === null) {
      location.hash = hash;
      return;
    }
    this.url.fallback = hash;
    this.render();
  }

  /** Links inside a sandboxed frame cannot change its address. */
  followLink(event) {
    const link = event.target.closest?.("a[href^='#/']");
    if (!link || this.url.fallback === null) return;
    event.preventDefault();
    this.open(link.getAttribute("href"));
  }

  /** The step or group before and after this one; undefined at the ends. */
  neighbours(what, { page, run, step, group, groups }) {
    const traced = run.traces.entropy_trace.steps.get(step) ?? run.traces.influence_trace.steps.get(step);
    const all =
      what === "step"
        ? run.stepsOf(this.kindsOf(page))
        : (groups ?? Array.from({ length: traced?.groups ?? 0 }, (_, index) => index));
    const here = what === "step" ? step : group;
    return { previous: all.findLast((each) => each < here), next: all.find((each) => each > here) };
  }

  move(page, direction) {
    if (!this.context?.run) return;
    const what = page === "group" ? "group" : "step";
    // The address is ahead of what is drawn while a page loads: a key pressed twice moves twice.
    const here = { ...this.context, [what]: this.url.number(what) ?? this.context[what] };
    const next = this.neighbours(what, here)[direction < 0 ? "previous" : "next"];
    const open = this.url.read().page;
    if (next !== undefined) this.go(this.isPage(open) && open !== "run" ? open : "step", { [what]: next });
  }

  toggleOverlay(name, on) {
    // The address is ahead of what is drawn while the page loads: two quick ticks count twice.
    const shown = this.overlaysOf(this.context.run).map((run) => run.name);
    const others = shown.filter((each) => each !== name);
    const names = on ? [...others, name] : others;
    this.url.update({ with: names.length ? names : NO_OVERLAY });
    this.render();
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.chrome.dialog?.open) return;
    if (event.target.matches?.("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const isControl = event.target.matches?.("button, a, [role=radio]");
    if (isControl && ["Enter", " "].includes(event.key)) return;
    if (this.frameKey(event.key) || this.page?.key?.(event)) event.preventDefault();
  }

  frameKey(key) {
    /** @type {HTMLInputElement | null} */
    const search = document.querySelector("main input[type=search]");
    const moveGroup = (direction) => this.context?.page === "group" && this.move("group", direction);
    const actions = {
      t: () => this.toggleTheme(),
      "?": () => this.chrome.showHelp(this.page?.hints ?? {}),
      "[": () => this.move("step", -1),
      "]": () => this.move("step", 1),
      h: () => moveGroup(-1),
      l: () => moveGroup(1),
      "/": () => search?.focus(),
    };
    actions[key]?.();
    return key in actions;
  }

  /* ---------- staying up to date ---------- */

  pollLater() {
    const live = this.context?.run && [this.context.run, ...this.context.overlays].some((run) => run.isLive);
    setTimeout(() => this.poll(), document.hidden ? QUIET_POLL : live ? LIVE_POLL : QUIET_POLL);
  }

  async poll() {
    const { context } = this;
    try {
      if (!context?.run) await this.refreshUntilRun();
      else {
        const changed = await Promise.all([context.run, ...context.overlays].map((run) => run.refresh()));
        if (this.context === context && changed.includes(true)) this.onNews(context);
        this.chrome.showLive(context.run);
      }
    } catch {
      this.chrome.showLive(context?.run, true);
    }
    this.pollLater();
  }

  async refreshUntilRun() {
    await this.refreshRuns();
    if (this.runs.length) await this.render();
  }

  onNews(context) {
    this.showBar(context);
    if (this.page?.update) this.page.update();
    else if (this.page?.waiting) this.render();
  }
}

/** The step itself, else the last one before it, else the first; undefined if there is none. */
function nearestStep(steps, step) {
  if (step === null || steps.includes(step)) return step;
  return steps.findLast((each) => each < step) ?? steps[0] ?? step;
}
