// What surrounds the work: tabs, the bar of actions, messages, dialogs. It knows nothing of items.

import { h } from "./dom.js";

// `known`: /api/tasks; `on`: {task(name), history, guidelines, help, undo, skip, submit}.
export class Frame {
  constructor(root, known, on) {
    this.tabs = h("nav", { class: "tabs", "aria-label": "Tasks" }, known.tasks.map((task) =>
      h("button", { type: "button", "data-task": task.name, class: task.open ? "" : "quiet", onclick: () => on.task(task.name) }, task.title)));
    this.saved = h("span", { class: "saved", role: "status" });
    this.count = h("span", { class: "count" });
    this.problem = h("span", { class: "problem" });
    this.stage = h("div", { class: "stage", id: "stage" });
    this.live = h("div", { class: "visually-hidden", "aria-live": "polite" });
    this.toastBox = h("div", { class: "toast", role: "alert", hidden: true });
    this.dialog = h("dialog", { class: "sheet" });
    this.actions = actionBar(this, on);
    root.replaceChildren(header(this, known, on), this.stage, this.actions, this.live, this.toastBox, this.dialog);
  }

  showTab(task) {
    for (const tab of this.tabs.children) tab.setAttribute("aria-current", tab.dataset.task === task ? "page" : "false");
  }

  sheet(title, content) {
    const close = h("button", { type: "button", class: "primary", onclick: () => this.dialog.close() }, "Close");
    this.dialog.replaceChildren(h("h2", {}, title), content, close);
    this.dialog.showModal();
  }

  toast(text) {
    this.toastBox.textContent = text;
    this.toastBox.hidden = false;
    clearTimeout(this.toastTimer);
    this.toastTimer = setTimeout(() => (this.toastBox.hidden = true), 4000);
  }
}

function header(frame, known, on) {
  const link = (text, href) => h("a", { href }, text);
  const out = h("form", { method: "post", action: "/logout" }, h("button", { class: "link" }, "Sign out"));
  const menu = h("details", { class: "menu" }, h("summary", { "aria-label": "Account" }, known.user),
    h("div", { class: "menu-list" }, link("Change password", "/password"), out));
  const button = (text, action, more = {}) => h("button", { class: "link", type: "button", onclick: action, ...more }, text);
  return h("header", { class: "top" },
    h("span", { class: "brand", "aria-hidden": "true" }, h("span"), h("span"), h("span")),
    frame.tabs, h("span", { class: "grow" }), frame.saved, frame.count,
    button("My work", on.history, { "data-action": "history" }), button("Guidelines", on.guidelines),
    button("?", on.help, { "aria-label": "Keyboard help" }), known.lead ? link("Lead", "/lead/") : null, menu);
}

function actionBar(frame, on) {
  const button = (name, key, action, kind = "") =>
    h("button", { type: "button", class: kind, "data-action": name.toLowerCase(), onclick: action },
      h("span", {}, name), " ", h("kbd", {}, key));
  return h("div", { class: "actions" },
    button("Undo", "U", on.undo), button("Skip", "S", on.skip), h("span", { class: "grow" }),
    frame.problem, button("Submit", "⏎", on.submit, "primary"));
}
