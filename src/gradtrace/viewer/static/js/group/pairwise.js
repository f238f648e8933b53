// The effect of each token on each response: blocks [tokens, members], loaded when somebody asks.

import { orNull } from "../source.js";

/** What `load` gives for a key, asked for once; an error is forgotten, so that the next one asks again. */
async function once(memory, key, load) {
  if (!memory.has(key)) memory.set(key, load());
  try {
    return await memory.get(key);
  } catch (error) {
    memory.delete(key);
    throw error;
  }
}

export class PairwiseInfluence {
  /** path: of the group; members: what the columns of a block stand for. */
  constructor(source, path, group) {
    this.source = source;
    this.path = path;
    this.group = group;
    this.blocks = new Map();
    this.columns = new Map();
  }

  get members() {
    return this.group.pairwise?.members ?? [];
  }

  get isStored() {
    return this.group.pairwise !== null;
  }

  /** The score that the effects add up to, which may be another one than the page shows. */
  get score() {
    return this.group.pairwise?.score ?? this.group.scores.at(-1);
  }

  /** Why there are no effects on single responses to show. */
  get whyNot() {
    const { scores, meta, isMeasured } = this.group;
    if (!scores.length) return "This group was not scored, so there is no influence to show.";
    if (meta.unit === "nats" && !isMeasured)
      return "Effects on single responses are stored for measured groups only: trainer.influence_trace.measure=all.";
    return "The effects on single responses were not stored here: the step's file would have exceeded trainer.influence_trace.pairwise_max_mb.";
  }

  /** float32[members]: what one token does to each of them; null if this response has no block. */
  async ofToken(response, position) {
    const block = await this.block(response);
    const width = this.members.length;
    return block?.subarray(position * width, (position + 1) * width) ?? null;
  }

  /** The whole block of a response: the next token under the arrow keys then needs no request. */
  block(response) {
    return orNull(once(this.blocks, response, () => this.source.floats(`${this.path}/pairwise/${response}`)));
  }

  /** float32[tokens of the group]: what every token does to one response. */
  onResponse(target) {
    return once(this.columns, target, () =>
      this.source.isLive ? this.source.floats(`${this.path}/pairwise/on/${target}`) : this.assemble(target),
    );
  }

  /** The same from the blocks: a report holds no second copy. */
  async assemble(target) {
    const values = new Float32Array(this.group.size).fill(NaN);
    const width = this.members.length;
    const column = this.members.findIndex((member) => member.response === target);
    for (const { index, start, length } of column >= 0 ? this.group.responses : []) {
      const block = await this.block(index);
      for (let position = 0; block && position < length; position++)
        values[start + position] = block[position * width + column];
    }
    return values;
  }
}

/** Effects in nats are changes of each response's own part of the objective. */
const TOTAL = { side: "Σ on the ", isSum: true, value: (side) => sumOf(side, () => 1) };
/** How the sides of a contrast are made and named, by the way the trace was made; `isSum`: they are added. */
const CONTRASTS = {
  advantage: {
    side: "Σ advantage × effect, ",
    isSum: true,
    value: (side) => sumOf(side, ({ advantage }) => advantage),
  },
  sum: { side: "sum on the ", value: (side) => sumOf(side, () => 1) },
  mean: { side: "mean on the ", value: (side) => sumOf(side, () => 1) / Math.max(1, side.length) },
};

function sumOf(members, weight) {
  return members.reduce((total, member) => total + weight(member) * member.effect, 0);
}

/** How the score of a token adds up from its effects: the lines of the sum and their total. */
export function contrast(members, effects, meta, ownResponse) {
  const isCounted = ({ effect, response }) =>
    Number.isFinite(effect) && !(meta.exclude_self_response && response === ownResponse);
  const counted = members.map((member, index) => ({ ...member, effect: effects[index] })).filter(isCounted);
  const {
    side,
    value,
    isSum = false,
  } = meta.unit === "nats" ? TOTAL : (CONTRASTS[meta.contrastive_agg] ?? CONTRASTS.mean);
  const accepted = value(counted.filter((member) => member.accepted));
  const rejected = value(counted.filter((member) => !member.accepted));
  const lines = [
    { label: `${side}accepted`, value: accepted },
    { label: `${isSum ? "+" : "−"} ${side}rejected`, value: rejected },
  ];
  return { lines, total: isSum ? accepted + rejected : accepted - rejected };
}
