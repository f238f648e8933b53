// Pages that say why there is nothing to see, and what to do about it.

import { element, emptyState, linkTo } from "../dom.js";

export function failurePage(error, context) {
  const unreadable = error.status === 422;
  const title = unreadable
    ? `Step ${context?.step ?? ""} cannot be read`
    : error.status === 404
      ? "Not there"
      : "Something went wrong";
  const rest = unreadable ? "The other steps are not affected. Use [ and ] to go to them." : "";
  if (error.status === undefined) console.error(error);
  return { node: emptyState("h1", title, String(error.message), rest), title: "problem" };
}

export function noRunPage(named) {
  const text = named
    ? `There is no run called “${named}” here.`
    : "There is no run here yet. `gradtrace train` makes one.";
  return { node: emptyState("h1", "No run", text), title: "no run", waiting: true };
}

const STILL_WRITING = "The first step is still being written. This page opens by itself when it is there.";

export function noTracePage(run) {
  const isOff = run.tokenKinds.every((kind) => run.enabled[kind] === false);
  const switches = run.instruments.filter(({ page }) => page === null).map((each) => each.switch);
  const [title, text] = isOff
    ? ["Tracing was off in this run", `Start it with ${switches.join(" ")} to see its tokens.`]
    : ["No traced step yet", run.isLive ? STILL_WRITING : "This run has no traced step."];
  return { node: emptyState("h1", title, text), title: "no trace", waiting: true };
}

export function noInstrumentPage(run, { kind, label, switch: setting }) {
  const isOff = !run.traces[kind].present && run.enabled?.[kind] !== true;
  const [title, text] = isOff
    ? [`${label} was off in this run`, `Start a run with ${setting} to see this page.`]
    : ["Nothing written yet", run.isLive ? STILL_WRITING : "This run has no step of it."];
  return { node: emptyState("h1", title, text), title: "no trace", waiting: true };
}

export function untracedStepPage(run, steps, step, isServer, href) {
  const before = steps.findLast((each) => each < step);
  const after = steps.find((each) => each > step);
  const links = element("p");
  for (const near of [before, after]) {
    if (near !== undefined) links.append(linkTo(href({ step: near }), "link-button", `step ${near}`), " ");
  }
  const ahead = run.isLive && step > run.lastStep;
  const text = !isServer
    ? `This report does not hold step ${step}. It holds:`
    : ahead
      ? `Step ${step} has not been written yet; this page opens by itself when it is.`
      : `Step ${step} was not traced (write_every), or its trace is still being written. The nearest traced steps:`;
  return { node: emptyState("h1", `No trace of step ${step}`, text, links), title: `step ${step}`, waiting: true };
}
