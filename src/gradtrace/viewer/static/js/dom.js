// Building nodes. Strings always become text nodes: nothing in this viewer is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/**
 * element("div", "head", "text", node, null) → <div class="head">text<node></div>; null children are left out.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {string} [className]
 * @param {...(Node | string | null | undefined)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function element(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  return append(node, ...children);
}

/**
 * @template {Element} E
 * @param {E} node
 * @param {...(Node | string | null | undefined)} children
 * @returns {E}
 */
export function append(node, ...children) {
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

/**
 * Attributes by name; null or false removes one, true sets it empty.
 * @template {Element} E
 * @param {E} node
 * @param {Record<string, any>} attributes
 * @returns {E}
 */
export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : value);
  }
  return node;
}

/**
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Node | string | null | undefined)} children
 * @returns {SVGElementTagNameMap[K]}
 */
export function svgElement(tag, attributes = {}, ...children) {
  return append(setAttributes(document.createElementNS(SVG, tag), attributes), ...children);
}

export function button(className, label, onClick) {
  const node = element("button", className, label);
  node.type = "button";
  node.addEventListener("click", onClick);
  return node;
}

export function linkTo(href, className, label) {
  const node = element("a", className, label);
  node.href = href;
  return node;
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
  return svgElement(
    "svg",
    { viewBox: "0 0 12 12", width: 12, height: 12, class: "mark", role: "img", "aria-label": label },
    ...shape,
  );
}

/** ●●●○○ : how many of n. Beyond 32 the dots say less than the number beside them. */
export function passDots(passed, total) {
  const dots = element("span", "dots");
  setAttributes(dots, { role: "img", "aria-label": `${passed} of ${total} accepted` });
  if (total <= 32) for (let i = 0; i < total; i++) dots.append(element("i", i < passed ? "full" : ""));
  return dots;
}

/** A big number with its name under it, for page heads. */
export function fact(value, label) {
  return element("div", "fact", element("b", "", value), element("span", "", label));
}

/** Why there is nothing to see. `level`: h1 where it is the whole page. */
export function emptyState(level, title, ...paragraphs) {
  const box = element("section", "empty", element(level, "", title));
  for (const paragraph of paragraphs) box.append(paragraph instanceof Node ? paragraph : element("p", "", paragraph));
  return box;
}

/** A bar to the left (negative) or right of a middle line. */
export function divergingBar(value, top) {
  const bar = element("i", value < 0 ? "n4" : "p4");
  bar.style.width = `${(50 * Math.abs(value)) / top}%`;
  return element("span", "diverging", bar);
}

/** A bar that fills this share (0…1) of its place. */
export function filledBar(className, share) {
  const bar = element("i", `bar-fill ${className}`);
  bar.style.width = `${100 * share}%`;
  return bar;
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
export function readoutItem(name, text) {
  return element("span", "", element("span", "name", name), text);
}

/** The value of a CSS variable, for canvases. */
export function cssColours(...names) {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
