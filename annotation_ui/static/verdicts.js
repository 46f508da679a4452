// The verdicts on a rule, and the buttons that give one (Judge rules, Probe).

import { radioGroup } from "./dom.js";

export const VERDICTS = [["violates", "Violates"], ["unsure", "Unsure"], ["follows", "Follows"]];

// Three buttons, one of which can be chosen, for the keys 1, 2 and 3. A form names and orders them its own way.
export function verdictButtons(label, choose, names = VERDICTS) {
  return radioGroup({ class: "verdicts", "aria-label": label }, names.map(([verdict, name], at) =>
    [verdict, name, { class: names === VERDICTS ? `verdict ${verdict}` : "verdict", "data-verdict": verdict, "data-key": at + 1 }]), choose);
}
