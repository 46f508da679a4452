// Demonstrate: write the response, with a preview.

import { conversation, h } from "../dom.js";
import { Writing, writingHelp } from "../writing.js";

export const help = () => writingHelp;

export function empty() {
  return { completion: "" };
}

export function missing(state) {
  return state.completion.trim() ? null : "Nothing written yet";
}

export function mount(root, view, context) {
  const writing = new Writing({ title: "Your response", label: "Your response (Markdown)", least: view.min_words, most: view.max_words,
    placeholder: "Write the ideal response. Markdown is supported.",
    changed: (completion) => context.typed({ completion }), toast: context.toast });
  root.append(h("div", { class: "columns even" },
    h("div", { class: "reading" }, conversation(view.prompt)), h("div", { class: "side wide" }, writing.element)));
  writing.show(context.state.completion);
  return {
    focus: (leaving) => writing.focus(leaving),
    restore: (next) => writing.show(next.completion),
    key: (event) => writing.key(event.key.toLowerCase()),
  };
}
