// Everything that is selected lives in the address, after the #, so that reload, back, bookmarks and "send me the
// link" work: #/group?run=demo&step=3&group=12&sel=6.12

function parse(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?", 2);
  return { page: path || "run", parameters: new URLSearchParams(query ?? "") };
}

function format(page, parameters) {
  const query = parameters.toString();
  return `#/${page}${query ? "?" + query : ""}`;
}

/** Sets, deletes (null) or repeats (array) parameters. */
function change(parameters, changes) {
  for (const [name, value] of Object.entries(changes)) {
    parameters.delete(name);
    const values = Array.isArray(value) ? value : [value];
    for (const one of values) if (one !== null && one !== undefined && one !== "") parameters.append(name, one);
  }
  return parameters;
}

export class UrlState {
  constructor() {
    // In a notebook cell "#/…" would lead to the notebook's own address: the state then lives here.
    this.fallback = location.protocol === "about:" ? "" : null;
  }

  read() {
    return parse(this.fallback ?? location.hash);
  }

  get(name) {
    return this.read().parameters.get(name);
  }

  getAll(name) {
    return this.read().parameters.getAll(name);
  }

  number(name) {
    const value = this.get(name);
    return value !== null && /^\d+$/.test(value) ? Number(value) : null;
  }

  /** One of the allowed values, else the first of them. */
  choice(name, allowed, otherwise = allowed[0]) {
    const value = this.get(name);
    return allowed.includes(value) ? value : otherwise;
  }

  /** Change parameters of this page without a new history entry. */
  update(changes) {
    const { page, parameters } = this.read();
    this.write(format(page, change(parameters, changes)));
  }

  write(hash) {
    if (this.fallback === null) {
      try {
        history.replaceState(null, "", hash);
        return;
      } catch {
        // a sandboxed frame: fall through
      }
    }
    this.fallback = hash;
  }

  /** The address of a page: the parameters in `keep` are carried over, then `changes` apply. */
  href(page, keep, changes = {}) {
    const { parameters } = this.read();
    const kept = new URLSearchParams();
    for (const name of keep) for (const value of parameters.getAll(name)) kept.append(name, value);
    return format(page, change(kept, changes));
  }
}
