// Copying gives the raw text of the tokens, never the glyphs we draw for newlines and special tokens. A selection that
// spans both columns copies one of them.

/** Raw text of the tokens under a selection, or null if it holds none. rows: from top to bottom. */
export function copiedText(group, rows, selection) {
  if (!selection || selection.isCollapsed || !selection.rangeCount) return null;
  const range = selection.getRangeAt(0);
  const slot = slotOf(range.startContainer) ?? slotOf(range.endContainer) ?? 0;
  const parts = [];
  for (const row of rows) {
    if (!row.isBuilt || !range.intersectsNode(row.slots[slot])) continue;
    const covered = row.spans[slot].map((span) => covers(range, span));
    const first = covered.indexOf(true);
    if (first < 0) continue;
    const last = covered.lastIndexOf(true);
    parts.push(group.rawText(row.response.start + first, row.response.start + last + 1));
  }
  return parts.length ? parts.join("\n\n") : null;
}

/** Does the range hold at least one character of this span? Touching its edge is not enough. */
function covers(range, span) {
  if (!range.intersectsNode(span)) return false;
  const text = document.createRange();
  const [first, last] = [deepest(span, "firstChild"), deepest(span, "lastChild")];
  text.setStart(first, 0);
  text.setEnd(last, last.nodeType === Node.TEXT_NODE ? last.length : 0);
  return (
    range.compareBoundaryPoints(Range.END_TO_START, text) < 0 &&
    range.compareBoundaryPoints(Range.START_TO_END, text) > 0
  );
}

function deepest(node, side) {
  while (node[side]) node = node[side];
  return node;
}

export function slotOf(node) {
  const container = (node.nodeType === Node.ELEMENT_NODE ? node : node.parentElement)?.closest(".tokens");
  return container?.slotIndex ?? null;
}
