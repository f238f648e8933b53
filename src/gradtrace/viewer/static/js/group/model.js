// A prompt group, decoded: structure from JSON, one float32 channel after the other from a single binary answer.

import { CHANNELS, learnChannels } from "../channels.js";
import { scoreStyle } from "../format.js";
import { startsOf } from "../statistics.js";
import { piecesOf, rawText, readVocabulary } from "../text.js";

/** Responses of at most this many tokens of at most two characters each are drawn as aligned cells. */
const LONGEST_CHAIN = 96;
const SHORT = 64;

export class Group {
  constructor(structure, floats) {
    this.structure = structure;
    this.vocabulary = readVocabulary(structure.vocabulary);
    this.prompt = structure.prompt.map((index) => this.vocabulary[index]);
    this.expected = structure.expected.map((index) => this.vocabulary[index]);
    this.pairwise = structure.pairwise;
    /** Counterfactual values, once they are read. @type {Record<string, any> | null} */
    this.measured = null;
    this.meta = structure.meta;
    const starts = startsOf(structure.responses.map(({ length }) => length));
    this.responses = structure.responses.map((response, index) => {
      const [start, end] = [starts[index], starts[index] + response.length];
      return { ...response, index, name: `r${index}`, start, end };
    });
    this.size = this.responses.at(-1)?.end ?? 0;
    learnChannels(structure.colours);
    this.channels = new Map(
      structure.channels.map((name, index) => [name, floats.subarray(index * this.size, (index + 1) * this.size)]),
    );
    this.responseOfToken = new Uint16Array(this.size);
    for (const response of this.responses) this.responseOfToken.fill(response.index, response.start, response.end);
    this.advantages = Float32Array.from(this.responseOfToken, (index) => this.responses[index].advantage ?? NaN);
    for (const response of this.responses) response.pieces = piecesOf(this.entriesOf(response));
    this.findTwins();
    this.mixed = this.responses.some((response) => response.accepted);
    this.hasTurns = this.responses.some((response) => response.segments);
    this.isChain = !this.hasTurns && this.looksLikeChain();
    /** Short prose: its rows are as high as their text, not as their numbers. */
    this.isShort = !this.isChain && this.responses.every((response) => response.length <= SHORT);
  }

  /** Responses with the same tokens and the same verdict: each knows them all, itself included, in order. */
  findTwins() {
    const sets = Map.groupBy(this.responses, ({ accepted, reward, start, end }) => {
      const tokens = this.channels.get("token").subarray(start, end);
      return `${accepted} ${reward} ${tokens.join(" ")}`;
    });
    for (const same of sets.values()) for (const response of same) response.twins = same.map(({ index }) => index);
  }

  /** Flat token index → vocabulary entry. */
  entry(token) {
    return this.vocabulary[this.channels.get("token")[token]];
  }

  entriesOf(response) {
    return Array.from(
      this.channels.get("token").subarray(response.start, response.end),
      (index) => this.vocabulary[index],
    );
  }

  piece(token) {
    const response = this.responses[this.responseOfToken[token]];
    return response.pieces[token - response.start];
  }

  rawText(from, to) {
    return rawText(Array.from({ length: to - from }, (_, offset) => this.entry(from + offset)));
  }

  /** float32 of every token, or null if this group has no such channel. */
  values(channel, score) {
    if (channel === "advantage")
      return this.responses.some((response) => response.advantage !== null) ? this.advantages : null;
    return this.channels.get(channel === "influence" ? score : channel) ?? null;
  }

  stepTop(channel, score) {
    return this.structure.scales[channel === "influence" ? score : channel] ?? null;
  }

  /** How the numbers of a channel are written where `top` is the largest in view: changes of log-probs in nats. */
  styleOf(channel, top, digits = 3) {
    const { unit, adds_up: addsUp } = CHANNELS[channel];
    return scoreStyle(channel === "influence" ? this.meta.unit : addsUp ? unit : "", top, digits);
  }

  /** Its scores by what they count: one in nats, or those of captured factors. */
  get scores() {
    return this.structure.scores;
  }

  /** Was it measured what the optimizer step did to this group? */
  get isMeasured() {
    return this.channels.has("log_prob_change");
  }

  /** The tokens that gained most in the place of this one: [{entry, before, after}]; empty where none are stored. */
  gainedBeside({ index }, position) {
    const found = this.structure.alternatives.find((each) => each.response === index && each.position === position);
    return (found?.gained ?? []).map(([at, before, after]) => ({ entry: this.vocabulary[at], before, after }));
  }

  /** Training takes no step on this token: it was clipped. */
  isPassedOver(token) {
    return this.channels.get("no_step")?.[token] === 1;
  }

  /** A tool, a user or a template wrote this token: it has no loss and no scores. */
  isOfOthers(token) {
    return this.channels.get("loss_mask")?.[token] === 0;
  }

  looksLikeChain() {
    if (!this.responses.length || this.responses.some((response) => response.length > LONGEST_CHAIN)) return false;
    const used = new Set(this.channels.get("token"));
    return [...used].every(
      (index) => this.vocabulary[index].special || (this.vocabulary[index].text ?? "   ").trim().length <= 2,
    );
  }
}

/** Sum of the finite values of a response. */
export function sumOver(values, response) {
  let sum = 0;
  for (let token = response.start; token < response.end; token++)
    if (Number.isFinite(values[token])) sum += values[token];
  return sum;
}
