// The questions that the page asks in a dialog: the password after a session has ended, and why an item is skipped.

import { BASE, h } from "./dom.js";

const REASONS = ["I don't understand the task or the text", "I don't know enough about the topic", "The text is broken, cut off or empty",
  "I don't want to read this"];

// Asks for the password until the session is renewed; what is on the page stays. Calls meanwhile wait for the same answer.
export class SignIn {
  constructor(user) {
    this.user = user;
    this.dialog = h("dialog", { class: "sheet sign-in", "aria-label": "Sign in again", oncancel: (event) => event.preventDefault() });
  }

  ask() {
    this.pending ??= new Promise((done) => this.show(done)).finally(() => (this.pending = null));
    return this.pending;
  }

  show(done) {
    const problem = h("p", { class: "refused", role: "alert" });
    const password = h("input", { type: "password", name: "password", autocomplete: "current-password", required: true, maxlength: "200" });
    const form = h("form", { onsubmit: async (event) => {
      event.preventDefault();
      problem.textContent = await this.refusalOf(password.value);
      if (problem.textContent) return password.select();
      this.dialog.close();
      done();
    } },
    h("h2", {}, "Your session has ended"),
    h("p", {}, "Your work is still here. Sign in again to save it and continue."),
    h("label", {}, "Name", h("input", { name: "name", autocomplete: "username", readonly: true, value: this.user })),
    h("label", {}, "Password", password), problem,
    h("div", { class: "row" }, h("button", { class: "primary" }, "Sign in"), h("a", { href: `${BASE}/login` }, "Use another account")));
    this.dialog.replaceChildren(form);
    document.querySelector(".workbench").append(this.dialog);
    this.dialog.showModal();
    password.focus();
  }

  async refusalOf(password) {
    const body = new URLSearchParams({ name: this.user, password });
    const answer = await fetch(`${BASE}/login`, { method: "POST", body, redirect: "manual" }).catch(() => null);
    if (answer === null || answer.status >= 500) return "Cannot reach the server. Try again.";
    if (answer.type === "opaqueredirect") return "";
    return answer.status === 429 ? "Too many attempts. Wait a few minutes and try again." : "Wrong password.";
  }
}

// Shows the dialog of a skip; `skip(reason)` is called unless it is left with Escape.
export function askForSkip(frame, skip) {
  const own = h("input", { class: "note", maxlength: "1000", "aria-label": "Other reason", placeholder: "Other reason" });
  const finish = (reason) => {
    frame.dialog.close();
    skip(reason);
  };
  const choices = REASONS.map((reason, index) =>
    h("button", { type: "button", onclick: () => finish(reason) }, h("kbd", { "aria-hidden": "true" }, String(index + 1)), " ", reason));
  const form = h("form", { class: "skip", onsubmit: (event) => { event.preventDefault(); finish(own.value.trim()); },
    onkeydown: (event) => {
      event.stopPropagation();
      if (event.repeat || event.target === own || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key.toLowerCase() === "s") finish("");
      else choices[Number(event.key) - 1]?.click();
    } },
  h("p", { class: "hint" }, "Another labeler gets this item. A reason is optional and helps the lead."),
  h("div", { class: "reasons" }, choices), own,
  h("div", { class: "row" }, h("button", { class: "primary" }, "Skip ", h("kbd", { "aria-hidden": "true" }, "S")),
    h("button", { type: "button", onclick: () => frame.dialog.close() }, "Cancel ", h("kbd", { "aria-hidden": "true" }, "Esc"))));
  frame.dialog.replaceChildren(h("h2", {}, "Skip this item?"), form);
  frame.dialog.showModal();
  form.querySelector(".primary").focus();
}
