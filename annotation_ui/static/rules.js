// Judge rules: one response, a list of rules, for each a verdict and a note.

import { conversation, h } from "./dom.js";

export const VERDICTS = [["violates", "Violates"], ["unsure", "Unsure"], ["follows", "Follows"]];

export const help = [
  ["↑ ↓", "choose a rule"],
  ["1 2 3", "violates, unsure, follows"],
  ["N", "write a note (Esc to leave it)"],
  ["A", "the rules that are still open: follows"],
];

export function empty() {
  return { verdicts: {} };
}

export function missing(state, view) {
  const open = view.rules.filter((rule) => !state.verdicts[rule.id]?.verdict).length;
  return open ? `${open} of ${view.rules.length} rules to judge` : null;
}

// Three buttons of which one is pressed; used by Probe too.
export function verdictButtons(label, chosen) {
  const buttons = VERDICTS.map(([verdict, name]) =>
    h("button", { type: "button", role: "radio", class: `verdict ${verdict}`, "data-verdict": verdict,
      onclick: () => chosen(verdict) }, name));
  const element = h("div", { class: "verdicts", role: "radiogroup", "aria-label": label }, buttons);
  const show = (verdict) => buttons.forEach((each) => each.setAttribute("aria-checked", String(each.dataset.verdict === verdict)));
  return { element, show };
}

export function mount(root, view, context) {
  let state = context.state;
  let at = 0;
  const lines = view.rules.map(line);
  root.append(
    h("div", { class: "columns even" },
      h("div", { class: "reading" }, conversation(view.prompt), h("h2", {}, "The response"),
        h("section", { class: "card" }, h("div", { class: "markdown", html: view.response }))),
      h("div", { class: "side wide" }, h("h2", {}, view.rules.length === 1 ? "The rule" : `${view.rules.length} rules`),
        h("ol", { class: "rules" }, lines.map((each) => each.element)))),
  );

  function line(rule, index) {
    const buttons = verdictButtons(rule.text, (verdict) => { choose(index, false); judge(verdict); });
    const note = h("input", { class: "note", placeholder: "Note (optional)", maxlength: "2000",
      "aria-label": `Note on: ${rule.text}`, oninput: () => context.typed(withVerdict(rule.id, { note: note.value })) });
    const said = context.others?.map((other) => `${other.answer.verdicts[rule.id]?.verdict ?? "–"} (${other.labeler})`);
    const element = h("li", { class: "rule", tabindex: "0", "data-rule": rule.id,
      onfocus: () => at !== index && choose(index, false) },
      h("p", {}, rule.text), buttons.element, note, said?.length ? h("p", { class: "hint" }, said.join(", ")) : null);
    return { element, note, show: buttons.show };
  }

  function withVerdict(id, part) {
    state = { verdicts: { ...state.verdicts, [id]: { verdict: null, note: "", ...state.verdicts[id], ...part } } };
    return state;
  }

  function judge(verdict) {
    const rule = view.rules[at];
    context.changed(withVerdict(rule.id, { verdict }), `${rule.text} ${verdict}`);
    show();
  }

  function choose(index, focus = true) {
    at = Math.max(0, Math.min(index, lines.length - 1));
    if (focus) lines[at].element.focus();
    show();
  }

  function restFollows() {
    let next = state;
    for (const rule of view.rules) {
      if (!next.verdicts[rule.id]?.verdict) next = withVerdict(rule.id, { verdict: "follows" });
    }
    context.changed(next, "The rest follows");
    show();
  }

  function show() {
    lines.forEach((each, index) => {
      const said = state.verdicts[view.rules[index].id];
      each.show(said?.verdict);
      if (each.note !== document.activeElement) each.note.value = said?.note ?? "";
      each.element.classList.toggle("chosen", index === at);
      each.element.classList.toggle("noted", Boolean(said?.note));
    });
  }

  show();
  return {
    focus: () => lines[at].element.focus({ preventScroll: true }),
    restore(next) {
      state = next;
      show();
    },
    key(event) {
      const key = event.key.toLowerCase();
      if (/^[123]$/.test(key)) {
        judge(VERDICTS[Number(key) - 1][0]);
        if (at + 1 < lines.length) choose(at + 1);
      } else if (key === "arrowdown" || key === "j") choose(at + 1);
      else if (key === "arrowup" || key === "k") choose(at - 1);
      else if (key === "n") lines[at].note.focus();
      else if (key === "a") restFollows();
      else return false;
      return true;
    },
  };
}
