// The pointer on the tokens of a group: what is under it, what is clicked, what is copied.

/** page: the group page. */
export function listenToTokens(page) {
  const { node } = page.sheet;
  let under = null;
  const hover = (token) => {
    if (under !== null) page.flag(under, "hov", false);
    under = token;
    if (token === null) return page.readout.hide();
    page.flag(token, "hov", true);
    return page.readout.show(page.group, token, page.tokenContext(token));
  };
  node.addEventListener("pointerover", (event) => hover(tokenOf(event.target)));
  node.addEventListener("pointerleave", () => hover(null));
  node.addEventListener("pointerdown", (event) => {
    const slot = slotOf(event.target);
    if (slot !== null) node.dataset.selecting = slot; // text of the other column stays out of the selection
  });
  node.addEventListener("click", (event) => {
    const token = tokenOf(event.target);
    if (token === null || !getSelection().isCollapsed) return; // a drag that selected text is not a click
    if (token === page.selection.token) page.clearSelection();
    else page.select(token).catch(page.context.fail);
  });
  document.addEventListener("copy", (event) => copy(page, event), { signal: page.abort.signal });
}

function copy(page, event) {
  const selection = getSelection();
  if (!page.sheet.node.contains(selection.anchorNode)) return;
  const rows = page.sheet.responses.map((response) => page.sheet.rows[response.index]);
  const text = copiedText(page.group, rows, selection);
  if (text === null) return;
  event.clipboardData.setData("text/plain", text);
  event.preventDefault();
}

function tokenOf(node) {
  const span = node.closest?.(".t");
  return span && span.token !== undefined ? span.token : null;
}

/** Raw text of the tokens under a selection, never the glyphs we draw for newlines and special tokens, or null if it
 * holds none. One that spans both columns copies one of them. rows: from top to bottom. */
function copiedText(group, rows, selection) {
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

function slotOf(node) {
  const container = (node.nodeType === Node.ELEMENT_NODE ? node : node.parentElement)?.closest(".tokens");
  return container?.slotIndex ?? null;
}
