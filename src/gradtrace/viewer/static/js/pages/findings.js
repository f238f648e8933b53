// The findings page: what the detectors said while the run went on, newest first, with evidence and where to look.

import { element, fact, linkTo } from "../dom.js";
import { general, plural } from "../format.js";
import { Page, pageHead } from "../page.js";

export async function openFindingsPage(context) {
  const { findings } = await context.source.json(`runs/${context.run.id}/findings`);
  return () => new FindingsPage(context, findings);
}

class FindingsPage extends Page {
  constructor(context, findings) {
    super(context, "findings", {}, "findings-page");
    this.findings = findings.filter(({ sentence }) => typeof sentence === "string");
    this.build();
  }

  build() {
    const { findings } = this;
    const kinds = new Map();
    for (const { detector } of findings) kinds.set(detector, (kinds.get(detector) ?? 0) + 1);
    const most = [...kinds].sort((a, b) => b[1] - a[1]).slice(0, 5);
    const facts = element("div", "facts", ...most.map(([detector, count]) => fact(String(count), words(detector))));
    const sentence = findings.length
      ? `${plural(findings.length, "finding")} while the run went on, the newest first. Each is told once, and again after it was gone.`
      : "Nothing was found: no detector had anything to say about this run.";
    this.node.append(pageHead("Findings", sentence, facts));
    const list = element("ol", "findings");
    for (const finding of [...findings].reverse()) list.append(this.item(finding));
    this.node.append(list);
  }

  /** A sentence, how sure it is, who is named, and the numbers behind it. */
  item(finding) {
    const { step, detector, confidence, sentence, culprits = [], evidence = {} } = finding;
    const title = "How far beyond its threshold the evidence is; 50% is at the threshold";
    const head = element(
      "div",
      "finding-head",
      this.link(this.isTraced(step) ? "step" : "run", { step }, `Step ${step}`),
      element("b", "", words(detector)),
      element("span", "sure", { title }, `${Math.round(100 * confidence)}% sure`),
    );
    const numbers = element("dl", "finding-evidence");
    for (const [name, value] of Object.entries(evidence))
      numbers.append(element("div", "", element("dt", "", words(name)), element("dd", "", general(value))));
    const named = element("ul", "finding-culprits");
    for (const culprit of culprits) named.append(this.culprit(culprit, step));
    return element("li", "finding", head, element("p", "", sentence), culprits.length ? named : null, numbers);
  }

  culprit({ text, group, row, position, share }, step) {
    const place = [
      group >= 0 ? `prompt ${group}` : null,
      row >= 0 ? `row ${row}` : null,
      position >= 0 ? `token ${position}` : null,
    ].filter(Boolean);
    const label = place.join(", ") || "token";
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
