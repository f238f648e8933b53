// The findings page: what the detectors said while the run went on, newest first, with evidence and where to look.

import { element, factList, linkTo } from "../dom.js";
import { general, plural } from "../format.js";
import { Page, pageHead } from "./page.js";

export async function openFindingsPage(context) {
  const { findings } = await context.source.json(`runs/${context.run.id}/findings`);
  return () => new FindingsPage(context, findings);
}

class FindingsPage extends Page {
  constructor(context, findings) {
    super(context, "findings", {}, "findings-page");
    const kinds = [...Map.groupBy(findings, ({ detector }) => detector)];
    const most = kinds.sort((a, b) => b[1].length - a[1].length).slice(0, 5);
    const sentence = findings.length
      ? `${plural(findings.length, "finding")} while the run went on, the newest first. Each is told once, and again after it was gone.`
      : "Nothing was found: no detector had anything to say about this run.";
    const list = element("ol", "findings", ...findings.map((finding) => this.item(finding)).reverse());
    const facts = factList(...most.map(([detector, found]) => [String(found.length), words(detector)]));
    this.node.append(pageHead("Findings", sentence, facts), list);
  }

  /** A sentence, how sure it is, who is named, and the numbers behind it. */
  item({ step, detector, confidence, sentence, culprits, evidence }) {
    const title = "How far beyond its threshold the evidence is; 50% is at the threshold";
    const head = element(
      "div",
      "finding-head",
      this.link(this.isTraced(step) ? "step" : "run", { step }, `Step ${step}`),
      element("b", "", words(detector)),
      element("span", "sure", { title }, `${Math.round(100 * confidence)}% sure`),
    );
    const numbers = Object.entries(evidence).map(([name, value]) =>
      element("div", "", element("dt", "", words(name)), element("dd", "", general(value))),
    );
    const named = culprits.map((culprit) => this.culprit(culprit, step));
    const list = named.length ? element("ul", "finding-culprits", ...named) : null;
    return element(
      "li",
      "finding",
      head,
      element("p", "", sentence),
      list,
      element("dl", "finding-evidence", ...numbers),
    );
  }

  culprit({ text, group, row, position, share }, step) {
    const numbers = Object.entries({ prompt: group, row, token: position }).filter(([, number]) => number >= 0);
    const label = numbers.map((each) => each.join(" ")).join(", ") || "token";
    const where = group >= 0 && this.isTraced(step) ? this.link("group", { step, group }, label) : label;
    const amount = typeof share === "number" ? element("span", "dim", general(share)) : null;
    return element("li", "", where, " ", element("code", "", text.slice(0, 200)), " ", amount);
  }

  isTraced(step) {
    return this.run.tracedSteps.includes(step);
  }

  link(page, changes, text) {
    return linkTo(this.context.href(page, changes), "", text);
  }
}

function words(name) {
  return name.replaceAll("_", " ");
}
