// A segmented control: a radio group that shows all its choices.

import { CREDIT_HINT, CREDIT_NAMES } from "./channels.js";
import { element, setAttributes } from "./dom.js";

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
  const labelId = `control-${nextId++}`;
  const name = element("span", "control-label", label);
  name.id = labelId;
  const group = setAttributes(element("div", "segments"), { role: "radiogroup", "aria-labelledby": labelId });
  const buttons = new Map();
  const listed = Array.isArray(options)
    ? options
    : Object.entries(options).map(([each, words]) => ({ value: each, label: words }));
  /** @type {Option[]} */
  const choices = listed.map((option) => (typeof option === "string" ? { value: option, label: option } : option));
  const select = (chosen) => {
    for (const [each, button] of buttons) {
      setAttributes(button, { "aria-checked": String(each === chosen), tabindex: each === chosen ? 0 : -1 });
    }
  };
  const choose = (chosen) => {
    select(chosen);
    onChange(chosen);
  };
  for (const option of choices) {
    const button = setAttributes(element("button", "", option.label), {
      type: "button",
      role: "radio",
      "data-value": option.value,
    });
    button.disabled = Boolean(option.disabled);
    if (option.why) button.title = option.why;
    button.addEventListener("click", () => choose(option.value));
    buttons.set(option.value, button);
    group.append(button);
  }
  group.addEventListener("keydown", (event) => {
    const direction = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!direction) return;
    event.preventDefault();
    event.stopPropagation();
    const enabled = choices.filter((option) => !option.disabled).map((option) => option.value);
    const at = enabled.findIndex((each) => buttons.get(each).getAttribute("aria-checked") === "true");
    const next = enabled[(at + direction + enabled.length) % enabled.length];
    buttons.get(next).focus();
    choose(next);
  });
  select(value);
  const control = element("div", "control", name, group);
  if (hint) control.title = hint;
  return Object.assign(control, { choose, select });
}

/** Which credit is shown, of those that the trace holds. */
export function creditControl(value, credits, onChange) {
  const options = Object.fromEntries(credits.map((each) => [each, CREDIT_NAMES[each]]));
  return segmentedControl({ label: "Credit", value, hint: CREDIT_HINT, options, onChange });
}

/** The value after `current` in a list, for keys that cycle through a control. */
export function nextOf(values, current) {
  return values[(values.indexOf(current) + 1) % values.length];
}

export function searchBox(placeholder, label, value, onInput) {
  const input = setAttributes(element("input"), {
    type: "search",
    placeholder,
    "aria-label": label,
    spellcheck: "false",
    autocomplete: "off",
  });
  input.value = value ?? "";
  input.addEventListener("input", () => onInput(input.value));
  return input;
}
