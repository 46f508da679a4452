// The verdicts on a rule, and the buttons that give one (Judge rules, Probe).

import { h, radioGroup } from "./dom.js";

export const VERDICTS = [["violates", "Violates"], ["unsure", "Unsure"], ["follows", "Follows"]];

// Buttons of which one can be chosen, for the keys 1, 2, 3 ...; each is known by its number, from 0. A form names and orders
// the verdicts its own way, and may have several buttons for one.
export function verdictButtons(label, choose, names = VERDICTS) {
  return radioGroup({ class: "verdicts", "aria-label": label }, names.map(([verdict, name], at) =>
    [at, name, { class: names === VERDICTS ? `verdict ${verdict}` : "verdict", "data-verdict": verdict, "data-key": at + 1 }]), choose);
}

// The scope and the examples of a rule; null if it has none.
export function ruleHelp(rule) {
  if (!rule.help && !rule.examples) return null;
  return h("div", { class: "rule-help" }, rule.help ? h("p", {}, rule.help, " ") : null,
    rule.examples ? h("p", {}, h("b", {}, "Examples: "), `${rule.examples.join("; ")}.`) : null);
}
