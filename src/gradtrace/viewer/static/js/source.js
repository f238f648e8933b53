// Where data comes from: the server, or, in a report, the page itself. Both answer to the same paths.

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

  /** Float32Array; the server sends little-endian numbers. */
  async floats(path) {
    return readFloats(await (await this.fetch(path)).arrayBuffer());
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
    const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
    return readFloats(bytes.buffer);
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

function readFloats(buffer) {
  const isLittleEndian = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;
  if (isLittleEndian) return new Float32Array(buffer);
  const view = new DataView(buffer);
  return Float32Array.from({ length: buffer.byteLength / 4 }, (_, index) => view.getFloat32(4 * index, true));
}
