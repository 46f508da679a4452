// Demonstrate: write the response, with a preview.

import { call, conversation, h } from "../dom.js";

export const help = () => [["E", "write"], ["Esc", "leave the text"], ["Ctrl+Enter", "submit while writing"], ["P", "preview"]];

export function empty() {
  return { completion: "" };
}

export function missing(state) {
  return state.completion.trim() ? null : "Nothing written yet";
}

const countWords = (text) => (text.trim() ? text.trim().split(/\s+/).length : 0);

export function mount(root, view, context) {
  let state = context.state;
  const text = h("textarea", { class: "writing", rows: "14", "aria-label": "Your response (Markdown)", maxlength: "200000",
    placeholder: "Write the response that the assistant should have given. Markdown works.",
    oninput: () => { state = { completion: text.value }; context.typed(state); measure(); } });
  const length = h("span", { class: "hint", role: "status" });
  const shown = h("div", { class: "markdown preview", hidden: true });
  const button = h("button", { type: "button", class: "small", onclick: () => preview() }, "Preview ", h("kbd", {}, "P"));
  root.append(
    h("div", { class: "columns even" },
      h("div", { class: "reading" }, conversation(view.prompt)),
      h("div", { class: "side wide" },
        h("div", { class: "row" }, h("h2", {}, "Your response"), h("span", { class: "grow" }), length, button), text, shown)),
  );

  function measure() {
    const count = countWords(text.value);
    const { min_words: least, max_words: most } = view;
    let wanted = "";
    if (least && most) wanted = ` (aim for ${least} to ${most})`;
    else if (least) wanted = ` (aim for at least ${least})`;
    else if (most) wanted = ` (aim for at most ${most})`;
    const outside = (least && count < least) || (most && count > most);
    length.textContent = `${count} ${count === 1 ? "word" : "words"}${wanted}`;
    length.classList.toggle("warn", Boolean(count && outside));
  }

  async function preview() {
    if (!shown.hidden) return write();
    const rendered = await call("POST", "preview", { text: text.value }).catch(() => null);
    if (!rendered) return context.toast("There is no preview now. Try again.");
    shown.innerHTML = rendered.html; // sanitized by the server
    shown.hidden = false;
    text.hidden = true;
    button.firstChild.textContent = "Write ";
  }

  function write() {
    shown.hidden = true;
    text.hidden = false;
    button.firstChild.textContent = "Preview ";
    text.focus();
  }

  function show() {
    text.value = state.completion;
    measure();
  }

  show();
  return {
    focus: (leaving) => (leaving ? document.activeElement.blur() : text.focus()),
    restore(next) {
      state = next;
      show();
    },
    key(event) {
      const key = event.key.toLowerCase();
      if (key === "p") preview();
      else if (key === "e") write();
      else return false;
      return true;
    },
  };
}
