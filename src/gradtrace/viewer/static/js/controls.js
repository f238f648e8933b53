// A segmented control: a radio group that shows all its choices.

import { CREDIT_HINT, CREDIT_NAMES } from "./channels.js";
import { button, element, setAttributes } from "./dom.js";

let nextId = 0;

/**
 * Arrow keys move inside the group, as radio groups do. Returns a node with `choose(value)`, which does what a click
 * does, and `select(value)`, which sets the choice without calling onChange.
 * options: {value: label}, or a list in which a value may stand for its own label.
 * @typedef {{value: string, label: string, disabled?: boolean, why?: string}} Option
 * @param {{label: string, options: Record<string, string> | (string | Option)[], value: string,
 *   onChange: (value: string) => void, hint?: string}} settings
 * @returns {HTMLElement & {choose(value: string): void, select(value: string): void}}
 */
export function segmentedControl({ label, options, value, onChange, hint = "" }) {
  const id = `control-${nextId++}`;
  const listed = Array.isArray(options)
    ? options
    : Object.entries(options).map(([each, words]) => ({ value: each, label: words }));
  /** @type {Option[]} */
  const choices = listed.map((option) => (typeof option === "string" ? { value: option, label: option } : option));
  const buttons = choices.map(({ value: own, label: words, disabled = false, why }) =>
    button("", words, () => choose(own), { role: "radio", "data-value": own, disabled, title: why || null }),
  );
  const select = (chosen) => {
    for (const each of buttons) {
      const isChosen = each.dataset.value === chosen;
      setAttributes(each, { "aria-checked": String(isChosen), tabindex: isChosen ? 0 : -1 });
    }
  };
  const choose = (chosen) => {
    select(chosen);
    onChange(chosen);
  };
  const onkeydown = (event) => {
    const direction = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!direction) return;
    event.preventDefault();
    event.stopPropagation();
    const enabled = buttons.filter((each) => !each.disabled);
    const at = enabled.findIndex((each) => each.getAttribute("aria-checked") === "true");
    const next = enabled[(at + direction + enabled.length) % enabled.length];
    next.focus();
    choose(next.dataset.value);
  };
  select(value);
  const name = element("span", "control-label", { id }, label);
  const group = element("div", "segments", { role: "radiogroup", "aria-labelledby": id, onkeydown }, ...buttons);
  return Object.assign(element("div", "control", { title: hint || null }, name, group), { choose, select });
}

/** Which credit is shown, of those that the trace holds; null where there is nothing to choose. */
export function creditControl(value, credits, onChange) {
  if (credits.length < 2) return null;
  const options = Object.fromEntries(credits.map((each) => [each, CREDIT_NAMES[each]]));
  return segmentedControl({ label: "Credit", value, hint: CREDIT_HINT, options, onChange });
}

/** The value after `current` in a list, for keys that cycle through a control. */
export function nextOf(values, current) {
  return values[(values.indexOf(current) + 1) % values.length];
}

export function searchBox(placeholder, label, value, onInput) {
  const words = { placeholder, "aria-label": label, value: value ?? "" };
  const oninput = () => onInput(input.value);
  const input = element("input", "", { type: "search", ...words, spellcheck: "false", autocomplete: "off", oninput });
  return input;
}
