// A field for a longer text in Markdown, with a count of words and a preview (Write responses, Correct answers).

import { call, h } from "./dom.js";

export const writingHelp = [["E", "write"], ["Esc", "leave the text field"], ["Ctrl+Enter", "submit while writing"], ["P", "preview"]];

const countWords = (text) => (text.trim() ? text.trim().split(/\s+/).length : 0);

// `options`: {title, label, placeholder, changed(text), toast(text), least, most: words to aim for, buttons: further ones}.
export class Writing {
  constructor(options) {
    this.options = options;
    this.text = h("textarea", { class: "writing", rows: "12", "aria-label": options.label, maxlength: "200000", dir: "auto",
      placeholder: options.placeholder, oninput: () => { options.changed(this.text.value); this.measure(); } });
    this.length = h("span", { class: "hint", role: "status" });
    this.shown = h("div", { class: "markdown preview", dir: "auto", hidden: true });
    this.button = h("button", { type: "button", class: "small", onclick: () => this.preview() }, "Preview ", h("kbd", {}, "P"));
    this.element = h("div", {}, h("div", { class: "row" }, h("h2", {}, options.title), h("span", { class: "grow" }), this.length,
      options.buttons ?? [], this.button), this.text, this.shown);
  }

  measure() {
    const count = countWords(this.text.value);
    const { least, most } = this.options;
    let wanted = "";
    if (least && most) wanted = ` (aim for ${least} to ${most})`;
    else if (least) wanted = ` (aim for at least ${least})`;
    else if (most) wanted = ` (aim for at most ${most})`;
    const outside = (least && count < least) || (most && count > most);
    this.length.textContent = `${count} ${count === 1 ? "word" : "words"}${wanted}`;
    this.length.classList.toggle("warn", Boolean(count && outside));
  }

  async preview() {
    if (!this.shown.hidden) return this.write();
    const rendered = await call("POST", "preview", { text: this.text.value }).catch(() => null);
    if (!rendered) return this.options.toast("Preview failed. Try again.");
    this.shown.innerHTML = rendered.html; // sanitized by the server
    this.shown.hidden = false;
    this.text.hidden = true;
    this.button.firstChild.textContent = "Write ";
  }

  write() {
    this.shown.hidden = true;
    this.text.hidden = false;
    this.button.firstChild.textContent = "Preview ";
    this.text.focus();
  }

  show(text) {
    if (this.text.value !== text) this.text.value = text;
    this.measure();
  }

  focus(leaving) {
    if (leaving) document.activeElement.blur();
    else this.text.focus();
  }

  key(key) {
    if (key === "p") this.preview();
    else if (key === "e") this.write();
    else return false;
    return true;
  }
}
