// Judge rules: a verdict and an optional note for each rule on one response.

import { conversation, h, remembered, written } from "../dom.js";
import { VERDICTS, ruleHelp, verdictButtons } from "../verdicts.js";

const HELP = "align-rule-help"; // remembered in this browser: whether the help of all rules is shown
const MOST_WITH_HELP = 14; // rules that show it from the start

// The buttons of a rule, in their order: [[verdict, name]]. Its reasons take the place of the verdict "violates".
function namesOf(rule) {
  const names = rule.answers ?? VERDICTS;
  if (!rule.reasons) return names;
  return [...rule.reasons.map((reason) => ["violates", reason]), ...names.filter(([verdict]) => verdict !== "violates")];
}

// A rule's verdict and note so far; at first, the preselected verdict.
const judgedOf = (state, rule) => ({ verdict: rule.preselect ?? null, note: rule.note ?? "", ...state.verdicts[rule.id] });
const verdictOf = (state, rule) => judgedOf(state, rule).verdict;

export function help(view) {
  const rules = view?.rules ?? [{}];
  const orders = new Set(rules.map((rule) => namesOf(rule).map(([, name]) => name.toLowerCase()).join(", ")));
  const good = [...new Set(rules.filter((rule) => !rule.gate).map((rule) => labelOf(rule, "follows").toLowerCase()))];
  return [
    ["↑ ↓", `select a ${rules[0].answers ? "question" : "rule"}`],
    ["1 2 3", orders.size === 1 ? [...orders][0] : "answer, in the order of the buttons"],
    ["N", "note (Esc to leave)"],
    ["A", rules[0].answers ? `answer the remaining questions with ${good.join(" or ")}` : "mark the remaining rules as followed"],
    ...(rules.some(hasHelp) ? [["H", "show or hide help for all rules"]] : []),
  ];
}

const hasHelp = (rule) => Boolean(rule.help || rule.examples);

export function empty() {
  return { verdicts: {} };
}

export function missing(state, view) {
  const rules = askedRules(state, view);
  const unjudged = rules.filter((rule) => !verdictOf(state, rule)).length;
  return unjudged ? `${unjudged} of ${rules.length} ${rules[0].answers ? "questions to answer" : "rules to judge"}` : null;
}

// What is submitted: the preselected verdicts, too.
export function answer(state, view) {
  return { verdicts: Object.fromEntries(askedRules(state, view).map((rule) => [rule.id, judgedOf(state, rule)])) };
}

// The gate that was violated first, behind which nothing is asked.
const closedGate = (state, view) => view.rules.find((rule) => rule.gate && verdictOf(state, rule) === "violates");

// The rules that need a verdict: the gates alone if one of them is violated.
const askedRules = (state, view) => (closedGate(state, view) ? view.rules.filter((rule) => rule.gate) : view.rules);

// A verdict's label in the form; without one, the verdict as it is stored.
const labelOf = (rule, verdict) => rule.answers?.find(([value]) => value === verdict)?.[1] ?? verdict;

export function mount(root, view, context) {
  let state = context.state;
  let chosen = 0;
  const lines = view.rules.map(ruleLine);
  const steps = view.rules.some((rule) => rule.step);
  const response = h("h2", {}, steps ? "Last utterance (highlighted)" : "Response");
  const reading = h("div", { class: "reading" }, conversation(view.prompt), response,
    h("section", { class: steps ? "card highlighted" : "card" }, written(view.response)));
  const list = h("ol", { class: "rules" }, lines.flatMap((line) => [line.step, line.element]));
  const closed = h("p", { class: "notice closed-gate", role: "status", hidden: true });
  root.append(
    h("div", { class: "columns even" }, reading,
      h("div", { class: "side wide" }, h("h2", {}, heading(view.rules)), list, closed)),
  );
  if (remembered(HELP, view.rules.length <= MOST_WITH_HELP)) list.classList.add("with-help");

  function heading(rules) {
    const [one, many] = rules[0]?.answers ? ["Question", "questions"] : ["Rule", "rules"];
    return rules.length === 1 ? one : `${rules.length} ${many}`;
  }

  function ruleLine(rule, index) {
    const buttons = verdictButtons(rule.text, (at) => { choose(index, false); judge(at); }, namesOf(rule));
    const note = rule.reasons ? null : h("input", { class: "note", placeholder: "Note (optional)", maxlength: "2000",
      "aria-label": `Note on: ${rule.text}`, oninput: () => context.typed(withVerdict(rule.id, { note: note.value })) });
    const answers = context.others?.map((other) => `${labelOf(rule, other.answer.verdicts[rule.id]?.verdict) ?? "–"} (${other.labeler})`);
    const element = h("li", { class: rule.reasons ? "rule several" : "rule", tabindex: "0", "data-rule": rule.id,
      onfocus: () => chosen !== index && choose(index, false) },
      h("p", {}, rule.text), buttons.element, ruleHelp(rule), note, answers?.length ? h("p", { class: "hint" }, answers.join(", ")) : null);
    const step = rule.step && rule.step !== view.rules[index - 1]?.step ? h("li", { class: "step", role: "heading", "aria-level": "3" }, rule.step) : null;
    return { element, step, note, show: buttons.show };
  }

  function withVerdict(id, part) {
    const rule = view.rules.find((rule) => rule.id === id);
    state = { verdicts: { ...state.verdicts, [id]: { ...judgedOf(state, rule), ...part } } };
    return state;
  }

  // `at` is the number of a button of the chosen rule.
  function judge(at) {
    const rule = view.rules[chosen];
    const [verdict, name] = namesOf(rule)[at];
    const note = rule.reasons ? { note: verdict === "violates" ? name : "" } : {};
    context.changed(withVerdict(rule.id, { verdict, ...note }), `${rule.text} ${name}`);
    show();
    const left = view.rules.length - askedRules(state, view).length;
    if (left && rule.gate) context.announce(closed.firstChild.textContent);
    lines[chosen].element.scrollIntoView({ block: "nearest" }); // it may have been scrolled away
  }

  function choose(index, focus = true) {
    chosen = Math.max(0, Math.min(index, askedRules(state, view).length - 1));
    if (focus) lines[chosen].element.focus();
    show();
    lines[chosen].element.scrollIntoView({ block: "nearest" }); // its help and its note, too
  }

  function markRestAsFollows() {
    let next = state;
    const rules = view.rules.filter((rule) => !rule.gate); // a gate is a question about the item itself
    const left = rules.filter((rule) => !verdictOf(state, rule));
    if (!left.length || closedGate(state, view)) return;
    for (const rule of left) next = withVerdict(rule.id, { verdict: "follows" });
    context.changed(next, "Marked the remaining rules as followed");
    show();
  }

  function showClosed() {
    const gate = closedGate(state, view);
    const left = gate ? view.rules.length - askedRules(state, view).length : 0;
    closed.hidden = !left;
    if (!left) return;
    const { verdict, note } = judgedOf(state, gate);
    const name = gate.reasons?.includes(note) ? note : labelOf(gate, verdict);
    const again = h("button", { type: "button", "data-action": "reopen-gate", onclick: () => reopen(gate) }, "Reopen ", h("kbd", {}, "U"));
    closed.replaceChildren(`“${name}” hides ${left} ${left === 1 ? "question" : "questions"}. `, again);
  }

  function reopen(gate) {
    chosen = view.rules.indexOf(gate);
    context.changed(withVerdict(gate.id, { verdict: null, note: "" }), "Reopened the remaining questions");
    show();
  }

  function toggleHelp() {
    localStorage.setItem(HELP, list.classList.toggle("with-help") ? "yes" : "no");
  }

  function show() {
    const asked = new Set(askedRules(state, view).map((rule) => rule.id));
    lines.forEach((line, index) => {
      const rule = view.rules[index];
      const { verdict, note } = judgedOf(state, rule);
      line.show(namesOf(rule).findIndex(([value, name]) => value === verdict && (!rule.reasons || value !== "violates" || name === note)));
      if (line.note && line.note !== document.activeElement) line.note.value = note;
      line.element.hidden = !asked.has(rule.id);
      if (line.step) line.step.hidden = line.element.hidden;
      line.element.classList.toggle("chosen", index === chosen);
      line.element.classList.toggle("noted", Boolean(state.verdicts[rule.id]?.note));
    });
    showClosed();
  }

  show();
  reading.scrollTop = response.offsetTop - 12; // in a wide window, the pane scrolls: begin at what is judged
  return {
    focus: () => lines[chosen].element.focus({ preventScroll: true }),
    restore(next) {
      state = next;
      show();
    },
    key(event) {
      const key = event.key.toLowerCase();
      if (/^[1-9]$/.test(key) && Number(key) <= namesOf(view.rules[chosen]).length) {
        judge(Number(key) - 1);
        if (chosen + 1 < lines.length && !lines[chosen + 1].element.hidden) choose(chosen + 1);
      } else if (key === "arrowdown" || key === "j") choose(chosen + 1);
      else if (key === "arrowup" || key === "k") choose(chosen - 1);
      else if (key === "n") lines[chosen].note?.focus();
      else if (key === "a") markRestAsFollows();
      else if (key === "h") toggleHelp();
      else return false;
      return true;
    },
  };
}
