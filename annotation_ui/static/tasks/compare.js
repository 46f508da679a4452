// Compare: two responses side by side, without the names of their models.

import { conversation, h, radioGroup, written } from "../dom.js";

export const help = () => [["1 or A", "A is better"], ["2 or B", "B is better"], ["T", "tie"], ["X", "both bad"],
  ["C", "comment (Esc to leave)"]];

const CHOICES = [["A", "A is better", "1"], ["tie", "Tie", "T"], ["both_bad", "Both bad", "X"], ["B", "B is better", "2"]];
const KEYS = { 1: "A", a: "A", arrowleft: "A", 2: "B", b: "B", arrowright: "B", t: "tie", x: "both_bad" };

export function empty() {
  return { choice: null, comment: "" };
}

export function missing(state) {
  return state.choice ? null : "Choose an answer";
}

export const summary = (state) => CHOICES.find(([choice]) => choice === state.choice)?.[1] ?? "";

export function mount(root, view, context) {
  let state = context.state;
  const cards = view.responses.map((response, index) =>
    h("section", { class: "card", "aria-label": `Response ${"AB"[index]}` },
      h("header", {}, h("h3", {}, "AB"[index])), written(response)));
  const choices = radioGroup({ class: "choices", "aria-label": "Which response is better?" }, CHOICES.map(([choice, name, key]) =>
    [choice, [name, " ", h("kbd", { "aria-hidden": "true" }, key)], { "data-choice": choice }]), choose);
  const comment = h("textarea", { class: "note", rows: "1", maxlength: "2000", "aria-label": "Comment on the comparison",
    placeholder: "Comment. Quote the text, because letters differ between labelers.", oninput: () => {
      state = { ...state, comment: comment.value };
      context.typed(state);
    } });
  const answers = context.others?.map((other) => `${other.answer.choice} (${other.labeler})`).join(", ");
  root.append(conversation(view.prompt), h("div", { class: "pair" }, cards),
    choices.element, comment,
    answers ? h("p", { class: "hint" }, `Labelers' answers: ${answers}`) : "");

  function choose(choice) {
    state = { ...state, choice };
    context.changed(state, choice);
    show();
  }

  function show() {
    choices.show(state.choice);
    if (comment !== document.activeElement) comment.value = state.comment ?? "";
    cards.forEach((card, index) => card.classList.toggle("chosen", state.choice === "AB"[index]));
  }

  show();
  root.tabIndex = -1;
  return {
    focus: () => root.focus({ preventScroll: true }),
    restore(next) {
      state = next;
      show();
    },
    key(event) {
      const key = event.key.toLowerCase();
      if (key === "c") comment.focus();
      else if (KEYS[key]) choose(KEYS[key]);
      else return false;
      return true;
    },
  };
}
