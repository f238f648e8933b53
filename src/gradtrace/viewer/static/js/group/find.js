// Search inside the responses. The browser's own search cannot see rows that are not drawn yet.

/** [{response, from, to}] positions, case-insensitive, in the order given. */
export function findInGroup(order, needle) {
  const wanted = needle.toLowerCase();
  if (!wanted) return [];
  return order.flatMap((response) => findInResponse(response, wanted));
}

function findInResponse(response, wanted) {
  const { text, starts } = searchable(response);
  const hits = [];
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
    hits.push({ response, from: tokenAt(starts, at), to: tokenAt(starts, at + wanted.length - 1) + 1 });
  }
  return hits;
}

/** The response in lower case, and where each token begins in it. Made once per response. */
function searchable(response) {
  if (!response.searchable) {
    const starts = new Uint32Array(response.pieces.length);
    const parts = [];
    let length = 0;
    for (const [position, piece] of response.pieces.entries()) {
      starts[position] = length;
      const lower = piece.text.toLowerCase();
      parts.push(lower);
      length += lower.length;
    }
    response.searchable = { text: parts.join(""), starts };
  }
  return response.searchable;
}

/** The last token that begins at or before a character. */
function tokenAt(starts, character) {
  let low = 0;
  let high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= character) low = middle;
    else high = middle - 1;
  }
  return low;
}
