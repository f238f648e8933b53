// Who made a step's gradient: shares of prompts, tokens and what no response did, above the list of responses.

import { element } from "../dom.js";
import { fixed, numberStyle } from "../format.js";

const LISTS = {
  prompts: "Prompts",
  tokens: "Tokens",
  vocabulary: "Equal tokens together",
  rest: "What no response did",
  cancelled: "Moved against their own advantage",
};

/** @param {{sentence: string, unit: string, [list: string]: any}} report */
export function blameReport(report) {
  const lists = element("div", "blame-lists");
  for (const [key, title] of Object.entries(LISTS)) {
    const table = element("table", "", ...report[key].map((part) => line(part, key)));
    if (report[key].length) lists.append(element("div", `blame-${key}`, element("h2", "", title), table));
  }
  return element("section", "blame-report", element("p", "", report.sentence), lists);
}

function line({ share, text, group, response, position, note }, key) {
  const place = [
    group >= 0 ? `p${group}` : "",
    response >= 0 ? `r${response}` : "",
    position >= 0 ? `token ${position}` : "",
  ].filter(Boolean);
  const amount = key === "cancelled" ? numberStyle(Math.abs(share)).signed(share) : `${fixed(100 * share, 1)}%`;
  return element(
    "tr",
    "",
    element("td", "number", amount),
    element("td", "", place.join(" ")),
    element("td", "", element("code", "", text.slice(0, 60))),
    element("td", "dim", note),
  );
}
