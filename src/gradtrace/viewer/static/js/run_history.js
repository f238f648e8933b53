// What a page knows of a run: its metrics by step, which steps are traced, whether it still goes on. Grows by polling.

const TRACES = ["entropy_trace", "influence_trace", "tracin", "entropy_probe"];
/** What the step, group and tokens pages show. */
export const TOKEN_TRACES = ["entropy_trace", "influence_trace"];

export class RunHistory {
  constructor(source, id, name) {
    this.source = source;
    this.id = id;
    this.name = name;
    this.metricsTo = 0;
    this.metricsFile = 0;
    this.rows = new Map();
    this.traces = Object.fromEntries(TRACES.map((kind) => [kind, { present: false, steps: new Map(), newest: 0 }]));
    this.columns = new Map();
  }

  /** Ask for what is new. True if anything changed that a page may want to draw. */
  async refresh() {
    const query = new URLSearchParams({ metrics: this.metricsTo, metrics_file: this.metricsFile });
    for (const kind of TRACES) query.set(kind, this.traces[kind].newest);
    const news = await this.source.json(`runs/${this.id}/news?${query}`);
    const changed = this.takeMetrics(news.metrics);
    const traced = TRACES.map((kind) => this.takeTrace(this.traces[kind], news.traces[kind]));
    const stateChanged = this.state !== news.state || this.ablation !== news.ablation;
    Object.assign(this, {
      state: news.state,
      totalSteps: news.total_steps,
      written: news.written,
      description: news.description,
      enabled: news.enabled,
      ablation: news.ablation,
      problems: news.problems,
      vocabularyProblem: news.vocabulary_problem,
      heardAt: Date.now(),
    });
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
    return this.stepsOf(TOKEN_TRACES);
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
    return this.ablation > 0 && !this.rows.size && !TRACES.some((kind) => this.traces[kind].present);
  }

  /** A probe of one checkpoint, not a training run. */
  get isSingleProbe() {
    return !this.rows.size && this.traces.entropy_probe.present && !this.tracedSteps.length;
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
