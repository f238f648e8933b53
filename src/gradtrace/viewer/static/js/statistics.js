// Extents, means and quantiles, places in a list of lengths, and the statistics of every distinct token.

/** The smallest and the largest of these values; there may be more than a function takes as arguments. */
export function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** The size of the value that is furthest from zero, and no less than `least`. */
export function largestSize(values, least = 0) {
  const [low, high] = extent(values);
  return Math.max(least, -low, high);
}

export function quantile(values, q) {
  const sorted = Float64Array.from(values).filter(Number.isFinite).sort();
  if (!sorted.length) return NaN;
  const at = (sorted.length - 1) * q;
  const below = Math.floor(at);
  const above = Math.min(sorted.length - 1, below + 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (at - below);
}

/** Mean of the finite values; NaN where there is none. */
export function meanOf(values) {
  const finite = Array.from(values).filter(Number.isFinite);
  return finite.length ? finite.reduce((sum, value) => sum + value, 0) / finite.length : NaN;
}

/** Where each of several parts begins that follow one another, by their lengths. */
export function startsOf(lengths) {
  let end = 0;
  return lengths.map((length) => (end += length) - length);
}

/** The place of the last of these that is not above `value`; `of` says what a number of theirs is, ascending. */
export function placeOf(list, value, of = (each) => each) {
  let [low, high] = [0, list.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (of(list[middle]) <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** [{index, count, scored, mean, entropy, size}] of every distinct token, of the points for which `isChosen` holds. */
export function tokenStatistics({ token, influence, entropy }, isChosen) {
  const found = new Map();
  for (let at = 0; at < token.length; at++) {
    if (!isChosen(at)) continue;
    const index = token[at];
    let entry = found.get(index);
    if (!entry)
      found.set(index, (entry = { index, count: 0, scored: 0, sum: 0, size: 0, entropySum: 0, entropies: 0 }));
    entry.count += 1;
    if (Number.isFinite(influence[at])) {
      entry.scored += 1;
      entry.sum += influence[at];
      entry.size += Math.abs(influence[at]);
    }
    if (Number.isFinite(entropy[at])) {
      entry.entropySum += entropy[at];
      entry.entropies += 1;
    }
  }
  return Array.from(found.values(), (entry) => ({
    ...entry,
    mean: entry.scored ? entry.sum / entry.scored : NaN,
    entropy: entry.entropies ? entry.entropySum / entry.entropies : NaN,
  }));
}

/** Where a token stands: how often, and its strongest occurrences as [{group, response, position, influence}]. */
export function occurrencesOf(points, index, isChosen, most) {
  const found = Array.from(points.token.keys()).filter((at) => points.token[at] === index && isChosen(at));
  const strength = (at) => Math.abs(points.influence[at]) || 0;
  const strongest = found.toSorted((a, b) => strength(b) - strength(a)).slice(0, most);
  const shown = strongest.map((at) => ({ ...points.place(at), influence: points.influence[at] }));
  return { total: found.length, shown };
}
