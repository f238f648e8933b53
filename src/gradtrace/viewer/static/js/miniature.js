// A group in a table cell: one line per response, accepted on top, coloured by influence.

import { cssColours, element, fitCanvas } from "./dom.js";
import { signedClass, signedClassName } from "./scales.js";

const WIDTH = 180;
const MOST_HEIGHT = 20;
const GAP = 2;

/** values: float32[responses, columns] with accepted responses first; top: of the step's scale. */
export function miniature(values, responses, columns, accepted, top) {
  const canvas = element("canvas", "miniature", { "aria-hidden": "true", style: { width: `${WIDTH}px` } });
  const line = Math.min(2.25, MOST_HEIGHT / responses);
  const height = responses * line + GAP;
  const context = fitCanvas(canvas, WIDTH, height);
  const colours = cssColours("bg2", "p1", "p2", "p3", "p4", "p5", "n1", "n2", "n3", "n4", "n5");
  const cell = WIDTH / columns;
  for (let response = 0; response < responses; response++) {
    const y = response * line + (response >= accepted ? GAP : 0);
    for (let column = 0; column < columns; column++) {
      const value = values[response * columns + column];
      if (Number.isNaN(value)) continue;
      context.fillStyle = colours[signedClassName(signedClass(value, top)) || "bg2"];
      context.fillRect(column * cell, y, Math.max(1, cell) + 0.3, line);
    }
  }
  return canvas;
}
