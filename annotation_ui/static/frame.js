// The parts of the page around the item: tabs, action buttons, messages, dialogs.

import { BASE, h, isRaw, toggleRaw } from "./dom.js";

// `account`: what /api/tasks returns; `handlers`: {task(name), history, guidelines, help, undo, skip, submit}.
export class Frame {
  constructor(root, account, handlers) {
    this.root = root;
    this.tabs = h("nav", { class: "tabs", "aria-label": "Tasks" }, account.tasks.map((task) =>
      h("button", { type: "button", "data-task": task.name, class: task.open ? "" : "quiet", onclick: () => handlers.task(task.name) }, task.title)));
    this.saved = h("span", { class: "saved", role: "status" });
    this.left = h("span", { class: "left" });
    this.count = h("span", { class: "count" });
    this.today = h("span", { class: "today" });
    this.raw = h("button", { class: "link", type: "button", "data-action": "raw", title: "Show raw text (R)",
      "aria-pressed": String(isRaw()), onclick: () => this.toggleRaw() }, "Raw text");
    this.problem = h("span", { class: "problem" });
    this.stage = h("div", { class: "stage", id: "stage" });
    this.live = h("div", { class: "visually-hidden", "aria-live": "polite" });
    this.toastBox = h("div", { class: "toast", role: "alert", hidden: true });
    this.dialog = h("dialog", { class: "sheet", // the Enter that opened it, still held, does not close it
      onkeydown: (event) => event.repeat && event.key === "Enter" && event.preventDefault() });
    this.actions = actionBar(this, handlers);
    const bar = header(this, account, handlers);
    const measure = (name, element) => new ResizeObserver(() => root.style.setProperty(name, `${element.offsetHeight}px`)).observe(element);
    measure("--bar", bar); // for what sticks below it and what is scrolled into view between the two
    measure("--foot", this.actions);
    new ResizeObserver(() => this.revealTab()).observe(this.tabs); // counts that come later leave less room for the tabs
    root.replaceChildren(bar, this.stage, this.actions, this.live, this.toastBox, this.dialog);
  }

  // Shows the tabs of the tasks that have an open batch for this labeler now.
  showOpen(tasks) {
    for (const task of tasks) this.tabs.querySelector(`[data-task="${task.name}"]`).classList.toggle("quiet", !task.open);
  }

  showTab(task) {
    for (const tab of this.tabs.children) tab.setAttribute("aria-current", tab.dataset.task === task ? "page" : "false");
    this.revealTab();
  }

  // Scrolls the current tab into view: on a phone, and beside many tasks, they overflow.
  revealTab() {
    const tab = this.tabs.querySelector('[aria-current="page"]');
    if (tab) this.tabs.scrollLeft = tab.offsetLeft - this.tabs.offsetLeft - 40;
  }

  // `counts`: the server's counts for this labeler and task; `deciding`: of a lead's decisions. None leaves the place empty.
  showCounts(counts, deciding) {
    const total = counts && counts.left + counts.done_of_open;
    const more = counts?.more_left ? "+" : "";
    this.left.textContent = counts ? `${counts.left.toLocaleString()}${more} of ${total.toLocaleString()}${more} left` : "";
    this.count.textContent = counts ? `${counts.done} done` : deciding ? `${deciding.left} to decide` : "";
    this.today.textContent = counts ? `${counts.today} today` : "";
  }

  toggleRaw() {
    const raw = toggleRaw(this.root);
    this.raw.setAttribute("aria-pressed", String(raw));
    this.live.textContent = raw ? "Showing raw text" : "Showing rendered text";
  }

  // In the corner: whether the draft is saved, or why not yet.
  showStatus(text) {
    this.saved.textContent = this.saved.title = text;
  }

  // A message above the item, with buttons, in place of an earlier one; `kind` tells `dropNotice` which one it is.
  notice(kind, text, ...buttons) {
    if (this.stage.querySelector(".notice.urgent")?.dataset.kind === kind) return;
    this.dropNotice();
    this.stage.prepend(h("div", { class: "notice urgent", role: "alert", "data-kind": kind }, h("p", {}, text), buttons));
  }

  dropNotice(kind) {
    this.stage.querySelector(`.notice.urgent${kind ? `[data-kind="${kind}"]` : ""}`)?.remove();
  }

  showDialog(title, content) {
    const close = h("button", { type: "button", class: "primary", onclick: () => this.dialog.close() }, "Close");
    this.dialog.replaceChildren(h("h2", {}, title), content, close);
    this.dialog.showModal();
    close.focus({ preventScroll: true }); // a long text begins at its beginning
    this.dialog.scrollTop = 0;
  }

  toast(text) {
    this.toastBox.textContent = text;
    this.toastBox.hidden = false;
    clearTimeout(this.toastTimer);
    this.toastTimer = setTimeout(() => (this.toastBox.hidden = true), 4000);
  }
}

function header(frame, account, handlers) {
  const link = (text, path) => h("a", { href: `${BASE}${path}` }, text);
  const out = h("form", { method: "post", action: `${BASE}/logout` }, h("button", { class: "link" }, "Sign out"));
  const menu = h("details", { class: "menu" }, h("summary", { "aria-label": "Account" }, account.user),
    h("div", { class: "menu-list" }, link("Change password", "/password"), out));
  const button = (text, action, more = {}) => h("button", { class: "link", type: "button", onclick: action, ...more }, text);
  return h("header", { class: "top" },
    h("span", { class: "brand", "aria-hidden": "true" }, h("span"), h("span"), h("span")),
    frame.tabs, h("span", { class: "grow" }), frame.saved, frame.left, frame.count, frame.today, frame.raw,
    button("My work", handlers.history, { "data-action": "history" }), button("Guidelines", handlers.guidelines),
    button("?", handlers.help, { "aria-label": "Keyboard help" }), account.lead ? link("Lead", "/lead/") : null, menu);
}

function actionBar(frame, handlers) {
  const button = (name, key, action, kind = "") =>
    h("button", { type: "button", class: kind, "data-action": name.toLowerCase(), onclick: action },
      h("span", {}, name), " ", h("kbd", {}, key));
  return h("div", { class: "actions" },
    button("Undo", "U", handlers.undo), button("Skip", "S", handlers.skip), h("span", { class: "grow" }),
    frame.problem, button("Submit", "⏎", handlers.submit, "primary"));
}
