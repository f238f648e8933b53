// Building nodes. Strings always become text nodes: nothing in this viewer is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | null | undefined | Record<string, any>} Part a child, nothing, or attributes by name */

/**
 * element("a", "tab", { href, onclick }, "text", node, null) → <a class="tab" href="…">text<node></a>
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {string} [className]
 * @param {...Part} parts
 * @returns {HTMLElementTagNameMap[K]}
 */
export function element(tag, className = "", ...parts) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  return append(node, ...parts);
}

/**
 * @template {Element} E
 * @param {E} node
 * @param {...Part} parts
 * @returns {E}
 */
export function append(node, ...parts) {
  for (const part of parts) {
    if (part === null || part === undefined) continue;
    if (typeof part === "string" || part instanceof Node) node.append(part);
    else setAttributes(node, part);
  }
  return node;
}

/**
 * Attributes by name; null or false removes one, true sets it empty. `onclick` and the like listen; `style` is an
 * object of CSS properties, because our policy allows no style attribute.
 */
export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : value);
  }
}

/**
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} tag
 * @param {...Part} parts
 * @returns {SVGElementTagNameMap[K]}
 */
export function svgElement(tag, ...parts) {
  return append(document.createElementNS(SVG, tag), ...parts);
}

export function svgLine(x1, y1, x2, y2, className) {
  return svgElement("line", { x1, y1, x2, y2, class: className });
}

export function svgDot(cx, cy, r, className) {
  return svgElement("circle", { cx, cy, r, class: className });
}

/** A line through these [x, y]. */
export function svgPath(points, className) {
  const d = points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  return svgElement("path", { d, class: className });
}

/** The area between two lines of [x, y]. */
export function svgBand(above, below, className) {
  const corners = [...above, ...below.toReversed()].map((place) => place.map((each) => each.toFixed(1)).join(","));
  return svgElement("polygon", { points: corners.join(" "), class: className });
}

/** A number or a name beside an axis, as an SVG node. */
export function axisText(x, y, text, anchor = "start", className = "axis") {
  return svgElement("text", { x, y, class: className, "text-anchor": anchor }, text);
}

export function button(className, label, onclick, attributes = {}) {
  return element("button", className, { type: "button", onclick, ...attributes }, label);
}

export function linkTo(href, className, label) {
  return element("a", className, { href }, label);
}

/** A list to choose one of: [[value, text]]. */
export function menuOf(label, options, onchange = null) {
  const node = element("select", "", { "aria-label": label });
  for (const [value, text] of options) node.append(element("option", "", { value }, text));
  if (onchange) node.addEventListener("change", onchange);
  return node;
}

/** @typedef {Part | [string, ...Part[]]} Cell what is in a cell, or its class name before that */

/** A row of a table: its cells after its class name and its attributes. @param {...Cell} cells */
export function rowOf(className, attributes, ...cells) {
  const shown = cells.map((cell) => (Array.isArray(cell) ? element("td", ...cell) : element("td", "", cell)));
  return element("tr", className, attributes, ...shown);
}

/** A row whose one cell goes through all columns. */
export function wideRow(className, columns, ...content) {
  return rowOf(className, null, ["", { colspan: columns }, ...content]);
}

/** A table with its heads above its body: a row of them, or {name: class name}. */
export function tableOf(className, heads, body) {
  const head = ([name, kind]) => element(name ? "th" : "td", kind, name);
  const row = heads instanceof Node ? heads : element("tr", "", ...Object.entries(heads).map(head));
  return element("table", className, element("thead", "", row), body);
}

/** Accepted and rejected differ in shape, fill and word, never in colour alone. */
export function acceptedMark(accepted) {
  const shape = accepted
    ? [
        svgElement("circle", { cx: 6, cy: 6, r: 5.5, class: "disc" }),
        svgElement("path", { d: "M3.4 6.2 5.3 8 8.7 4.2", class: "tick" }),
      ]
    : [
        svgElement("circle", { cx: 6, cy: 6, r: 4.9, class: "ring" }),
        svgElement("path", { d: "M4.2 4.2 7.8 7.8M7.8 4.2 4.2 7.8", class: "cross" }),
      ];
  const label = accepted ? "accepted" : "rejected";
  const size = { viewBox: "0 0 12 12", width: 12, height: 12 };
  return svgElement("svg", { ...size, class: "mark", role: "img", "aria-label": label }, ...shape);
}

/** ●●●○○ : how many of n. Beyond 32 the dots say less than the number beside them. */
export function passDots(passed, total) {
  const dots = Array.from({ length: total <= 32 ? total : 0 }, (_, i) => element("i", i < passed ? "full" : ""));
  return element("span", "dots", { role: "img", "aria-label": `${passed} of ${total} accepted` }, ...dots);
}

/** Big numbers with their names under them, for page heads: [value, name, hint?], or null for none. */
export function factList(...facts) {
  const known = facts.filter((each) => each !== null);
  const parts = known.map(([value, label, title = null]) =>
    element("div", "fact", { title }, element("b", "", value), element("span", "", label)),
  );
  return element("div", "facts", ...parts);
}

/** Mark one of these nodes as the current one, and bring it into view. */
export function markCurrent(nodes, current) {
  for (const node of nodes) node.classList.toggle("current", node === current);
  current?.scrollIntoView({ block: "nearest" });
}

/** Why there is nothing to see. `level`: h1 where it is the whole page. */
export function emptyState(level, title, ...paragraphs) {
  const box = element("section", "empty", element(level, "", title));
  for (const paragraph of paragraphs) box.append(paragraph instanceof Node ? paragraph : element("p", "", paragraph));
  return box;
}

/** A bar to the left (negative) or right of a middle line. */
export function divergingBar(value, top) {
  const style = { width: `${(50 * Math.abs(value)) / top}%` };
  return element("span", "diverging", element("i", value < 0 ? "n4" : "p4", { style }));
}

/** A bar that fills this share (0…1) of its place. */
export function filledBar(className, share) {
  return element("i", `bar-fill ${className}`, { style: { width: `${100 * share}%` } });
}

/** Give a canvas its size in CSS pixels; its context draws in them, sharp on every screen. */
export function fitCanvas(canvas, width, height) {
  const density = devicePixelRatio;
  canvas.width = width * density;
  canvas.height = Math.ceil(height * density);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(density, density);
  return context;
}

/** Call `build(node)` once for each node, when it comes near the screen; `disconnect()` of what is returned ends it. */
export function whenNear(nodes, rootMargin, build) {
  const act = (entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      observer.unobserve(target);
      build(target);
    }
  };
  const observer = new IntersectionObserver(act, { rootMargin });
  for (const node of nodes) observer.observe(node);
  return observer;
}

/** Text of a readout: a name and what belongs to it. */
export function readoutItem({ name, text }) {
  return element("span", "", element("span", "name", name), text);
}

/** The value of a CSS variable, for canvases. */
export function cssColours(...names) {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
