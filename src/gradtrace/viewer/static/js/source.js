// Where data comes from (the server or, in a report, the page itself), and what is known of a run so far.

import { largestSize } from "./statistics.js";

class SourceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** What was asked for, or null where it is not there. */
export async function orNull(answer) {
  try {
    return await answer;
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

/** The viewer's server. The browser's cache and our ETags see to it that nothing is sent twice. */
export class ServerSource {
  constructor() {
    this.isLive = true;
  }

  async json(path) {
    return (await this.fetch(path)).json();
  }

  /** Null: every group of the step is there. */
  groupsOf() {
    return null;
  }

  /** Float32Array; the server sends little-endian numbers, as every browser's platform has them. */
  async floats(path) {
    return new Float32Array(await (await this.fetch(path)).arrayBuffer());
  }

  /** Ask the server to do something; its answer is JSON. */
  async post(path) {
    return (await this.fetch(path, { method: "POST" })).json();
  }

  async fetch(path, options = {}) {
    let response;
    try {
      response = await fetch(`api/${path}`, options);
    } catch {
      throw new SourceError("The viewer's server does not answer. Is `gradtrace view` still running?", 0);
    }
    if (!response.ok) throw new SourceError(await errorText(response), response.status);
    return response;
  }
}

async function errorText(response) {
  const body = await response.text();
  try {
    return JSON.parse(body).error;
  } catch {
    return body || `the server answered ${response.status}`;
  }
}

/** A report: everything it can show is in the page, as JSON and base64. */
export class EmbeddedSource {
  constructor({ json, floats }) {
    this.isLive = false;
    this.jsonByPath = json;
    this.floatsByPath = floats;
  }

  async json(path) {
    return lookUp(this.jsonByPath, path);
  }

  async floats(path) {
    const text = atob(lookUp(this.floatsByPath, path));
    return new Float32Array(Uint8Array.from(text, (character) => character.charCodeAt(0)).buffer);
  }

  /** Indices of the groups of a step that this report holds, in order. */
  groupsOf(run, step) {
    const prefix = `runs/${run}/steps/${step}/groups/`;
    const names = Object.keys(this.jsonByPath).filter((path) => path.startsWith(prefix));
    const numbers = names.map((path) => path.slice(prefix.length)).filter((name) => /^\d+$/.test(name));
    return numbers.map(Number).sort((a, b) => a - b);
  }
}

/** What was stored for a path: with its query if that is there, else without. */
function lookUp(table, path) {
  for (const key of [path, path.split("?")[0]]) if (Object.hasOwn(table, key)) return table[key];
  throw new SourceError("This report does not hold that part of the run.", 404);
}

/**
 * An instrument as the server describes it. `page` is null where its tokens are on the step, group and tokens pages.
 * @typedef {{kind: string, label: string, page: string | null, switch: string}} Instrument
 */

/** What news says about a run as a whole. */
const TOLD = "state written description enabled ablation findings problems total_steps vocabulary_problem".split(" ");

export class RunHistory {
  state = "";
  written = 0;
  description = "";
  /** @type {Record<string, boolean | null>} what the configuration says about each instrument; null: nothing */
  enabled = {};
  ablation = 0;
  findings = 0;
  /** @type {string[]} */
  problems = [];
  /** @type {number | null} */
  total_steps = null;
  vocabulary_problem = "";
  metricsTo = 0;
  metricsFile = 0;
  /** @type {Map<number, Record<string, any>>} */
  rows = new Map();
  columns = new Map();

  /** @param {Instrument[]} instruments */
  constructor(source, id, name, instruments) {
    this.source = source;
    this.id = id;
    this.name = name;
    this.instruments = instruments;
    this.kinds = instruments.map(({ kind }) => kind);
    this.tokenKinds = instruments.filter(({ page }) => page === null).map(({ kind }) => kind);
    this.traces = Object.fromEntries(this.kinds.map((kind) => [kind, { present: false, steps: new Map(), newest: 0 }]));
  }

  /** Ask for what is new. True if anything changed that a page may want to draw. */
  async refresh() {
    const query = new URLSearchParams({ metrics: String(this.metricsTo), metrics_file: String(this.metricsFile) });
    for (const kind of this.kinds) query.set(kind, String(this.traces[kind].newest));
    const news = await this.source.json(`runs/${this.id}/news?${query}`);
    const changed = ["state", "ablation", "findings"].some((name) => this[name] !== news[name]);
    for (const name of TOLD) this[name] = news[name];
    this.columns.clear(); // series are made again from what is known now
    const logged = this.takeMetrics(news.metrics);
    const traced = this.kinds.map((kind) => this.takeTrace(this.traces[kind], news.traces[kind]));
    if (traced.includes("again")) {
      await this.refresh();
      return true;
    }
    return changed || logged || traced.includes("changed");
  }

  /** A resumed run rewrites the end of its metrics: the server then starts over, and so do we. */
  takeMetrics({ rows, continued, to, file }) {
    if (!continued) this.rows.clear();
    this.metricsTo = to;
    this.metricsFile = file;
    for (const row of rows)
      if (Number.isInteger(row.step)) this.rows.set(row.step, { ...this.rows.get(row.step), ...row });
    return rows.length > 0;
  }

  takeTrace(known, news) {
    const changed = news.steps.length > 0 || known.present !== news.present;
    known.present = news.present;
    known.newest = news.newest;
    for (const entry of news.steps) known.steps.set(entry.step, entry);
    if (known.steps.size === news.count) return changed ? "changed" : "same";
    known.steps.clear(); // steps went away: read the whole list again
    known.newest = 0;
    return "again";
  }

  get isLive() {
    return this.state === "live";
  }

  /** Steps with at least one token trace, in order. */
  get tracedSteps() {
    return this.stepsOf(this.tokenKinds);
  }

  /** Steps with at least one trace of these kinds, in order. */
  stepsOf(kinds) {
    const steps = new Set(kinds.flatMap((kind) => [...this.traces[kind].steps.keys()]));
    return [...steps].sort((a, b) => a - b);
  }

  get metricSteps() {
    return [...this.rows.keys()].sort((a, b) => a - b);
  }

  get lastStep() {
    return largestSize([...this.rows.keys(), ...this.tracedSteps]);
  }

  /** [{step, value}] of a metric, or of a function of a row; steps without it are left out. */
  series(name, compute = (row) => row[name]) {
    if (!this.columns.has(name)) {
      const points = [];
      for (const step of this.metricSteps) {
        const value = compute(this.rows.get(step));
        if (typeof value === "number" && Number.isFinite(value)) points.push({ step, value });
      }
      this.columns.set(name, points);
    }
    return this.columns.get(name);
  }

  /** Nothing but an ablation's table is in this folder. */
  get isAblation() {
    return this.ablation > 0 && !this.rows.size && !this.kinds.some((kind) => this.traces[kind].present);
  }

  /** The page of the one instrument that made this folder outside of training, such as a probe of a checkpoint. */
  get onlyPage() {
    const made = this.instruments.filter(({ kind }) => this.traces[kind].steps.size);
    return !this.rows.size && made.length === 1 ? made[0].page : null;
  }

  /** Why there is nothing of an instrument to see, in words. */
  whyNone(kind) {
    const { label, switch: setting } = this.instruments.find((each) => each.kind === kind);
    if (this.enabled[kind] === false && !this.traces[kind].present) return `${label} was off: ${setting} turns it on`;
    if (this.isLive) return "nothing written yet";
    return this.traces[kind].present ? "this run logged no such metric" : `no ${label} in this run`;
  }

  get metricNames() {
    const names = new Set([...this.rows.values()].flatMap(Object.keys));
    names.delete("step");
    return [...names].sort();
  }

  stateLine() {
    const doing = { live: "live", quiet: "no news" }[this.state];
    if (!doing) return `${this.state}, ${this.lastStep} steps`;
    return `${doing}, step ${this.lastStep}${this.total_steps ? ` of ${this.total_steps}` : ""}`;
  }
}
