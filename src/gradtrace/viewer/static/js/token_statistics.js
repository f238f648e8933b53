// Per distinct token: how often it occurs, its mean influence and entropy. One pass over the points.

/** [{index, count, mean, entropy, size}] of the points for which `isChosen` holds. */
export function tokenStatistics(points, isChosen) {
  const found = new Map();
  for (let at = 0; at < points.token.length; at++) {
    if (!isChosen(at)) continue;
    const index = points.token[at];
    let entry = found.get(index);
    if (!entry)
      found.set(index, (entry = { index, count: 0, scored: 0, sum: 0, size: 0, entropySum: 0, entropies: 0 }));
    entry.count += 1;
    const influence = points.influence[at];
    if (Number.isFinite(influence)) {
      entry.scored += 1;
      entry.sum += influence;
      entry.size += Math.abs(influence);
    }
    if (Number.isFinite(points.entropy[at])) {
      entry.entropySum += points.entropy[at];
      entry.entropies += 1;
    }
  }
  for (const entry of found.values()) {
    entry.mean = entry.scored ? entry.sum / entry.scored : NaN;
    entry.entropy = entry.entropies ? entry.entropySum / entry.entropies : NaN;
  }
  return [...found.values()];
}

/** The strongest occurrences of a token: [{group, response, position, influence, entropy}]. */
export function occurrencesOf(points, index, isChosen, most) {
  const found = Array.from(points.token.keys()).filter((at) => points.token[at] === index && isChosen(at));
  const strength = (at) => Math.abs(points.influence[at]) || 0;
  found.sort((a, b) => strength(b) - strength(a));
  return {
    total: found.length,
    shown: found
      .slice(0, most)
      .map((at) => ({ ...points.place(at), influence: points.influence[at], entropy: points.entropy[at] })),
  };
}
