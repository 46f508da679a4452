// Compare: two responses side by side, blind.

import { conversation, h } from "./dom.js";

export const help = [["1 or A", "A is better"], ["2 or B", "B is better"], ["T", "a tie"], ["X", "both are bad"]];

const CHOICES = [["A", "A is better", "1"], ["tie", "Tie", "T"], ["both_bad", "Both bad", "X"], ["B", "B is better", "2"]];
const KEYS = { 1: "A", a: "A", arrowleft: "A", 2: "B", b: "B", arrowright: "B", t: "tie", x: "both_bad" };

export function empty() {
  return { choice: null };
}

export function missing(state) {
  return state.choice ? null : "Choose one";
}

export function mount(root, view, context) {
  let state = context.state;
  const cards = view.responses.map((response, index) =>
    h("section", { class: "card", "aria-label": `Response ${"AB"[index]}` },
      h("header", {}, h("h3", {}, "AB"[index])), h("div", { class: "markdown", html: response.html })));
  const buttons = CHOICES.map(([choice, name, key]) =>
    h("button", { type: "button", role: "radio", "data-choice": choice, onclick: () => choose(choice) }, name, " ", h("kbd", {}, key)));
  const said = context.others?.map((other) => `${other.answer.choice} (${other.labeler})`).join(", ");
  root.append(conversation(view.prompt), h("div", { class: "pair" }, cards),
    h("div", { class: "choices", role: "radiogroup", "aria-label": "Which one is better?" }, buttons),
    said ? h("p", { class: "hint" }, `Labelers said: ${said}`) : "");

  function choose(choice) {
    state = { choice };
    context.changed(state, choice);
    show();
  }

  function show() {
    for (const button of buttons) button.setAttribute("aria-checked", String(button.dataset.choice === state.choice));
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
      const choice = KEYS[event.key.toLowerCase()];
      if (choice) choose(choice);
      return Boolean(choice);
    },
  };
}
