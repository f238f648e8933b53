// The pointer on the tokens of a group: what is under it, what is clicked, what is copied.

import { copiedText, slotOf } from "./copy.js";

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
  const text = copiedText(page.group, page.sheet.orderedRows, selection);
  if (text === null) return;
  event.clipboardData.setData("text/plain", text);
  event.preventDefault();
}

function tokenOf(node) {
  const span = node.closest?.(".t");
  return span && span.token !== undefined ? span.token : null;
}
