// The filter box of the step page: words, and conditions such as pass<4 ent>0.2 len>=100 inf>10 reward>0.5.

const CONDITION = /^(pass|ent|len|inf|reward)(<=|>=|<|>|=)(-?\d+(?:\.\d+)?)$/;
const TESTS = {
  "<": (a, b) => a < b,
  ">": (a, b) => a > b,
  "<=": (a, b) => a <= b,
  ">=": (a, b) => a >= b,
  "=": (a, b) => a === b,
};

/** A function group → boolean. Every term must hold; terms that are no condition are looked for in the prompt. */
export function groupFilter(text, measure) {
  const terms = text.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const tests = terms.map((term) => {
    const match = CONDITION.exec(term);
    if (!match) return (group) => group.prompt.toLowerCase().includes(term);
    const [, name, operator, number] = match;
    return (group) => {
      const value = measure(group, name);
      return Number.isFinite(value) && TESTS[operator](value, Number(number));
    };
  });
  return (group) => tests.every((test) => test(group));
}
