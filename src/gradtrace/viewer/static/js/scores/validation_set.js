// The prompts whose gradient every score refers to, with their responses.

import { append, element, passDots, tableOf } from "../dom.js";
import { fixed } from "../format.js";
import { meanOf } from "../scales.js";
import { opener, wideRow } from "../sorting.js";

export class ValidationSet {
  /** `openGroup`: index of the prompt whose responses are shown, or null. `onOpen(index)` is told when it changes. */
  constructor({ validation, groups }, openGroup, onOpen) {
    this.groups = groups;
    this.openGroup = openGroup;
    this.onOpen = onOpen;
    this.body = element("tbody");
    this.node = this.build(validation);
  }

  build(validation) {
    const section = element("section", "validation", element("h2", "section-title", "Validation prompts"));
    if (!validation.length) {
      section.append(element("p", "dim", "The validation set of this step was not stored."));
      return section;
    }
    this.byGroup = Map.groupBy(validation, (row) => row.group);
    const heads = { Prompt: "", "Best reward": "", "Mean reward": "number" };
    section.append(
      element("p", "dim", "Their gradient is what every score refers to. Click one to read its responses."),
      tableOf("fixed validation-table", heads, this.body),
    );
    this.draw();
    return section;
  }

  draw() {
    this.body.replaceChildren();
    for (const [index, rows] of this.byGroup) {
      const rewards = rows.map((row) => row.reward);
      const best = Math.max(...rewards);
      const isOpen = this.openGroup === index;
      const passed = best > Math.min(...rewards, 0) ? rewards.filter((reward) => reward === best).length : 0;
      const onclick = () => {
        this.openGroup = isOpen ? null : index;
        this.onOpen(this.openGroup);
        this.draw();
      };
      const node = element(
        "tr",
        `opens${isOpen ? " current" : ""}`,
        { "data-validation": index, onclick },
        element("td", "mono", opener(this.groups[index].text, isOpen)),
        element("td", "", passDots(passed, rewards.length), ` ${fixed(best, 2)}`),
        element("td", "number", fixed(meanOf(rewards), 2)),
      );
      append(this.body, node, isOpen ? validationRow(rows) : null);
    }
  }
}

function validationRow(rows) {
  const list = element("ul", "validation-responses");
  for (const row of rows)
    list.append(element("li", "", element("b", "", fixed(row.reward, 2)), element("span", "mono", row.text)));
  return wideRow("opened", 3, list);
}
