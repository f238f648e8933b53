// What a page knows of a run: its metrics by step, which steps are traced, whether it still goes on. Grows by polling.

/**
 * An instrument as the server describes it. `page` is null where its tokens are on the step, group and tokens pages.
 * @typedef {{kind: string, label: string, page: string | null, switch: string}} Instrument
 */

/** What news says about a run as a whole, under the same names. */
const TOLD = ["state", "written", "description", "enabled", "ablation", "findings", "problems"];

export class RunHistory {
  /** @param {Instrument[]} instruments */
  constructor(source, id, name, instruments) {
    this.source = source;
    this.id = id;
    this.name = name;
    this.instruments = instruments;
    this.kinds = instruments.map(({ kind }) => kind);
    this.tokenKinds = instruments.filter(({ page }) => page === null).map(({ kind }) => kind);
    this.metricsTo = 0;
    this.metricsFile = 0;
    /** @type {Map<number, Record<string, any>>} */
    this.rows = new Map();
    this.traces = Object.fromEntries(this.kinds.map((kind) => [kind, { present: false, steps: new Map(), newest: 0 }]));
    this.columns = new Map();
    this.state = "";
    this.totalSteps = null;
    this.written = 0;
    this.description = "";
    /** @type {Record<string, boolean | null>} what the configuration says about each instrument; null: nothing */
    this.enabled = {};
    this.ablation = 0;
    this.findings = 0;
    /** @type {string[]} */
    this.problems = [];
    this.vocabularyProblem = "";
  }

  /** Ask for what is new. True if anything changed that a page may want to draw. */
  async refresh() {
    const query = new URLSearchParams({ metrics: String(this.metricsTo), metrics_file: String(this.metricsFile) });
    for (const kind of this.kinds) query.set(kind, String(this.traces[kind].newest));
    const news = await this.source.json(`runs/${this.id}/news?${query}`);
    const changed = this.takeMetrics(news.metrics);
    const traced = this.kinds.map((kind) => this.takeTrace(this.traces[kind], news.traces[kind]));
    const stateChanged =
      this.state !== news.state || this.ablation !== news.ablation || this.findings !== news.findings;
    for (const name of TOLD) this[name] = news[name];
    this.totalSteps = news.total_steps;
    this.vocabularyProblem = news.vocabulary_problem;
    this.columns.clear(); // series are made again from what is known now
    if (traced.includes("again")) return (await this.refresh()) || true;
    return changed || stateChanged || traced.includes("changed");
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
    return Math.max(0, ...this.rows.keys(), ...this.tracedSteps);
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
    if (this.enabled?.[kind] === false && !this.traces[kind].present) return `${label} was off: ${setting} turns it on`;
    return this.isLive ? "nothing written yet" : `no ${label} in this run`;
  }

  get metricNames() {
    const names = new Set();
    for (const row of this.rows.values()) for (const name of Object.keys(row)) names.add(name);
    names.delete("step");
    return [...names].sort();
  }

  stateLine() {
    const total = this.totalSteps;
    const last = this.lastStep;
    if (this.state === "live") return total ? `live, step ${last} of ${total}` : `live, step ${last}`;
    if (this.state === "quiet") return `no news, step ${last}${total ? ` of ${total}` : ""}`;
    return `${this.state}, ${last} steps`;
  }
}
