// Correct answers: change a model's answer into the one that it should have given, with the changes in sight.

import { conversation, h, written } from "../dom.js";
import { differenceView } from "../diff.js";
import { Writing, writingHelp } from "../writing.js";

export const help = () => [...writingHelp, ["O", "restore the model's answer"], ["A", "accept the answer without changes"]];

export function empty(view) {
  return { completion: view.response.text, outcome: "corrected" };
}

export function missing(state, view) {
  if (!state.completion.trim()) return "The answer is empty";
  return state.outcome === "accepted" || state.completion !== view.response.text ? null : "Correct the answer, or accept it (A)";
}

export const summary = (state) => (state.outcome === "accepted" ? "Accepted without changes" : "");

export function mount(root, view, context) {
  let { state } = context;
  const changes = differenceView("Your changes");
  const accept = h("button", { type: "button", class: "small", "data-action": "accept", onclick: () => take("accepted") }, "Accept ", h("kbd", {}, "A"));
  const again = h("button", { type: "button", class: "small", "data-action": "original", onclick: () => take("corrected") }, "Original ", h("kbd", {}, "O"));
  const writing = new Writing({ title: "Your correction", label: "Corrected answer (Markdown)", placeholder: "Write the corrected answer.",
    buttons: [accept, again], toast: context.toast, changed: (completion) => {
      state = { completion, outcome: "corrected" };
      context.typed(state);
      show();
    } });
  root.append(h("div", { class: "columns even" },
    h("div", { class: "reading" }, conversation(view.prompt), h("h2", {}, "The model's answer"), h("section", { class: "card" }, written(view.response))),
    h("div", { class: "side wide correction" }, writing.element, h("h2", {}, "Your changes"), changes.element)));

  // The model's answer in place of what is written.
  function take(outcome) {
    state = { completion: view.response.text, outcome };
    context.changed(state, outcome === "accepted" ? "Accepted without changes" : "Restored the model's answer");
    show();
  }

  function show() {
    writing.show(state.completion);
    changes.show(view.response.text, state.completion);
    changes.element.classList.toggle("none", state.completion === view.response.text);
    accept.setAttribute("aria-pressed", String(state.outcome === "accepted"));
  }

  show();
  root.tabIndex = -1;
  return {
    focus: () => root.focus({ preventScroll: true }), // the answer is read before it is changed
    restore(next) {
      state = next;
      show();
    },
    key(event) {
      const key = event.key.toLowerCase();
      if (key === "a") take("accepted");
      else if (key === "o") take("corrected");
      else return writing.key(key);
      return true;
    },
  };
}
