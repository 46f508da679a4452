// Judge rules: a verdict and an optional note for each rule on one response.

import { conversation, h, written } from "../dom.js";
import { VERDICTS, verdictButtons } from "../verdicts.js";

// The names of the verdicts of a rule, in the order of its buttons: [[verdict, name]].
const namesOf = (rule) => rule.answers ?? VERDICTS;

export function help(view) {
  const rules = view?.rules ?? [{}];
  const orders = new Set(rules.map((rule) => namesOf(rule).map(([, name]) => name.toLowerCase()).join(", ")));
  const good = [...new Set(rules.map((rule) => labelOf(rule, "follows").toLowerCase()))];
  return [
    ["↑ ↓", `choose a ${rules[0].answers ? "question" : "rule"}`],
    ["1 2 3", orders.size === 1 ? [...orders][0] : "the answers, in the order of the buttons"],
    ["N", "write a note (Esc to leave it)"],
    ["A", rules[0].answers ? `answer all that is left so that it follows the rule: ${good.join(" or ")}` : "judge all remaining rules as follows"],
  ];
}

export function empty() {
  return { verdicts: {} };
}

export function missing(state, view) {
  const rules = askedRules(state, view);
  const unjudged = rules.filter((rule) => !state.verdicts[rule.id]?.verdict).length;
  return unjudged ? `${unjudged} of ${rules.length} ${rules[0].answers ? "questions to answer" : "rules to judge"}` : null;
}

// The rules that need a verdict: the gates alone if one of them is violated.
function askedRules(state, view) {
  const gates = view.rules.filter((rule) => rule.gate);
  return gates.some((gate) => state.verdicts[gate.id]?.verdict === "violates") ? gates : view.rules;
}

// A verdict's label in the form; without one, the verdict as it is stored.
const labelOf = (rule, verdict) => rule.answers?.find(([value]) => value === verdict)?.[1] ?? verdict;

export function mount(root, view, context) {
  let state = context.state;
  let chosen = 0;
  const lines = view.rules.map(ruleLine);
  const response = h("h2", {}, "The response");
  const reading = h("div", { class: "reading" }, conversation(view.prompt), response, h("section", { class: "card" }, written(view.response)));
  root.append(
    h("div", { class: "columns even" }, reading,
      h("div", { class: "side wide" }, h("h2", {}, heading(view.rules)),
        h("ol", { class: "rules" }, lines.map((line) => line.element)))),
  );

  function heading(rules) {
    const [one, many] = rules[0]?.answers ? ["The question", "questions"] : ["The rule", "rules"];
    return rules.length === 1 ? one : `${rules.length} ${many}`;
  }

  function ruleLine(rule, index) {
    const buttons = verdictButtons(rule.text, (verdict) => { choose(index, false); judge(verdict); }, namesOf(rule));
    const note = h("input", { class: "note", placeholder: "Note (optional)", maxlength: "2000",
      "aria-label": `Note on: ${rule.text}`, oninput: () => context.typed(withVerdict(rule.id, { note: note.value })) });
    const answers = context.others?.map((other) => `${labelOf(rule, other.answer.verdicts[rule.id]?.verdict) ?? "–"} (${other.labeler})`);
    const element = h("li", { class: "rule", tabindex: "0", "data-rule": rule.id,
      onfocus: () => chosen !== index && choose(index, false) },
      h("p", {}, rule.text), buttons.element, note, answers?.length ? h("p", { class: "hint" }, answers.join(", ")) : null);
    return { element, note, show: buttons.show };
  }

  function withVerdict(id, part) {
    const note = view.rules.find((rule) => rule.id === id).note ?? "";
    state = { verdicts: { ...state.verdicts, [id]: { verdict: null, note, ...state.verdicts[id], ...part } } };
    return state;
  }

  function judge(verdict) {
    const rule = view.rules[chosen];
    context.changed(withVerdict(rule.id, { verdict }), `${rule.text} ${labelOf(rule, verdict)}`);
    show();
    lines[chosen].element.scrollIntoView({ block: "nearest" }); // it may have been scrolled away
  }

  function choose(index, focus = true) {
    chosen = Math.max(0, Math.min(index, askedRules(state, view).length - 1));
    if (focus) lines[chosen].element.focus();
    show();
  }

  function markRestAsFollows() {
    let next = state;
    for (const rule of view.rules) {
      if (!next.verdicts[rule.id]?.verdict) next = withVerdict(rule.id, { verdict: "follows" });
    }
    context.changed(next, "All remaining rules: follows");
    show();
  }

  function show() {
    const asked = new Set(askedRules(state, view).map((rule) => rule.id));
    lines.forEach((line, index) => {
      const judged = state.verdicts[view.rules[index].id];
      line.show(judged?.verdict);
      if (line.note !== document.activeElement) line.note.value = judged?.note ?? view.rules[index].note ?? "";
      line.element.hidden = !asked.has(view.rules[index].id);
      line.element.classList.toggle("chosen", index === chosen);
      line.element.classList.toggle("noted", Boolean(judged?.note));
    });
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
      if (/^[123]$/.test(key)) {
        judge(namesOf(view.rules[chosen])[Number(key) - 1][0]);
        if (chosen + 1 < lines.length && !lines[chosen + 1].element.hidden) choose(chosen + 1);
      } else if (key === "arrowdown" || key === "j") choose(chosen + 1);
      else if (key === "arrowup" || key === "k") choose(chosen - 1);
      else if (key === "n") lines[chosen].note.focus();
      else if (key === "a") markRestAsFollows();
      else return false;
      return true;
    },
  };
}
