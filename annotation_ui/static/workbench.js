// The labelers' page: which task, the open item, drafts, undo, skip, submit, help. What is asked and answered is the
// business of the tasks' own modules, each with: help, empty(view), missing(state, view), mount(root, view, context).

import { Refused, call, clone, h, insist, isTyping, requestId } from "./dom.js";
import * as compare from "./compare.js";
import * as demonstrate from "./demonstrate.js";
import * as probe from "./probe.js";
import * as rank from "./rank.js";
import * as rules from "./rules.js";

const MODULES = { rank, rules, demonstrate, probe, compare };
const COMMON_HELP = [["Enter", "submit"], ["U", "undo, also what was submitted last"], ["S", "skip this item"],
  ["G", "guidelines"], ["?", "this help"]];
const DRAFT_PAUSE = 300; // ms between the last change and its saving
const RENEW_EVERY = 60_000; // ms: an open page keeps its item
const MOST_PAST = 50; // steps that undo goes back within one item

export async function start(element) {
  const root = element.querySelector(".workbench");
  const known = await call("GET", "tasks");
  const asked = new URLSearchParams(location.search).get("task");
  const open = known.tasks.find((task) => task.open)?.name ?? "rank";
  new Workbench(root, known).show(MODULES[asked] ? asked : open);
}

class Workbench {
  constructor(root, known) {
    this.root = root;
    this.known = known;
    this.item = null;
    this.saving = Promise.resolve();
    this.tabs = h("nav", { class: "tabs", "aria-label": "Tasks" }, known.tasks.map((task) =>
      h("button", { type: "button", "data-task": task.name, class: task.open ? "" : "quiet", onclick: () => this.show(task.name) }, task.title)));
    this.saved = h("span", { class: "saved", role: "status" });
    this.count = h("span", { class: "count" });
    this.stage = h("div", { class: "stage", id: "stage" });
    this.live = h("div", { class: "visually-hidden", "aria-live": "polite" });
    this.toastBox = h("div", { class: "toast", role: "alert", hidden: true });
    this.dialog = h("dialog", { class: "sheet" });
    this.actions = this.actionBar();
    root.replaceChildren(this.header(), this.stage, this.actions, this.live, this.toastBox, this.dialog);
    document.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("visibilitychange", () => document.hidden && this.flush(true));
    window.addEventListener("pagehide", () => this.flush(true));
    setInterval(() => this.tick(), 1000);
    setInterval(() => this.item && !document.hidden && this.save(), RENEW_EVERY);
  }

  header() {
    const link = (text, href) => h("a", { href }, text);
    const out = h("form", { method: "post", action: "/logout" }, h("button", { class: "link" }, "Sign out"));
    const menu = h("details", { class: "menu" }, h("summary", { "aria-label": "Account" }, this.known.user),
      h("div", { class: "menu-list" }, link("Change password", "/password"), out));
    return h("header", { class: "top" },
      h("span", { class: "brand", "aria-hidden": "true" }, h("span"), h("span"), h("span")),
      this.tabs, h("span", { class: "grow" }), this.saved, this.count,
      h("button", { class: "link", type: "button", onclick: () => this.showGuidelines() }, "Guidelines"),
      h("button", { class: "link", type: "button", "aria-label": "Keyboard help", onclick: () => this.showHelp() }, "?"),
      this.known.lead ? link("Lead", "/lead/") : null, menu);
  }

  actionBar() {
    const button = (name, key, action, kind = "") =>
      h("button", { type: "button", class: kind, "data-action": name.toLowerCase(), onclick: action }, name, " ", h("kbd", {}, key));
    return h("div", { class: "actions" },
      button("Undo", "U", () => this.undo()), button("Skip", "S", () => this.skip()), h("span", { class: "grow" }),
      this.problem = h("span", { class: "problem" }), button("Submit", "⏎", () => this.submit(), "primary"));
  }

  async show(task) {
    await this.flush();
    this.task = task;
    for (const tab of this.tabs.children) tab.setAttribute("aria-current", tab.dataset.task === task ? "page" : "false");
    history.replaceState(null, "", `?task=${task}`);
    await this.next();
  }

  async next() {
    const task = this.task;
    const page = await this.guarded(() => insist("POST", `tasks/${task}/next`, {}, () => this.waiting()));
    if (!page || task !== this.task) return;
    this.guidelines = page.guidelines;
    this.count.textContent = `${page.done} done`;
    this.saved.textContent = "";
    this.item = page.item;
    this.module = MODULES[task];
    this.actions.hidden = !page.item;
    this.stage.replaceChildren();
    if (!page.item) {
      this.page = null;
      this.stage.append(h("div", { class: "nothing" }, h("h2", {}, "Nothing to do here"),
        h("p", {}, "There is no item of this task left for you. Another task may have some, or the lead adds more."),
        h("button", { type: "button", onclick: () => this.next() }, "Look again"), " ",
        h("button", { type: "button", "data-action": "undo", onclick: () => this.undo() }, "Undo the last one")));
      return;
    }
    this.open(page.item);
  }

  open(item) {
    const draft = item.draft ?? {};
    this.sequence = item.sequence;
    this.state = { ...this.module.empty(item.view), ...(draft.state ?? {}) };
    this.past = draft.past ?? [];
    this.dirty = false;
    this.seconds = 0;
    this.submitting = requestId();
    this.page = this.module.mount(this.stage, item.view, {
      state: clone(this.state),
      assignment: item.assignment,
      transcript: item.transcript,
      others: item.others,
      changed: (state, said) => this.changed(state, said),
      typed: (state) => this.typed(state),
      submit: () => this.submit(),
      toast: (text) => this.toast(text),
    });
    this.root.scrollTo(0, 0);
    this.page.focus();
    this.showProblem();
  }

  // One step that undo takes back.
  changed(state, said) {
    this.past = [...this.past, this.state].slice(-MOST_PAST);
    this.typed(state);
    if (said) this.live.textContent = said;
  }

  // Typing in a field, which has an undo of its own.
  typed(state) {
    this.state = clone(state);
    this.dirty = true;
    this.lastActive = Date.now();
    this.saved.textContent = "Saving…";
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.save(), DRAFT_PAUSE);
    this.showProblem();
  }

  showProblem() {
    this.problem.textContent = this.module.missing(this.state, this.item.view) ?? "";
  }

  // Drafts go one after the other; a later one carries a higher number, and the server keeps the highest.
  save(keepalive = false) {
    clearTimeout(this.timer);
    const { item } = this;
    if (!item) return this.saving;
    this.dirty = false;
    this.sequence += 1;
    const body = { draft: { state: this.state, past: this.past }, sequence: this.sequence };
    this.saving = this.saving.then(async () => {
      try {
        const answer = await call("PUT", `assignments/${item.assignment}/draft`, body, { keepalive });
        this.saved.textContent = answer.held ? "Saved" : "Saved; this item has gone to somebody else";
      } catch (error) {
        if (item !== this.item) return;
        if (error instanceof Refused) return this.refused(error);
        this.waiting();
        this.timer = setTimeout(() => this.save(), 2000);
      }
    });
    return this.saving;
  }

  flush(keepalive = false) {
    return this.dirty ? this.save(keepalive) : this.saving;
  }

  async submit() {
    if (!this.item || this.busy) return;
    const problem = this.module.missing(this.state, this.item.view);
    if (problem) return this.toast(problem);
    await this.handIn("submit", { answer: this.state });
  }

  async skip() {
    if (this.item && !this.busy) await this.handIn("skip", { reason: "" });
  }

  async handIn(what, more) {
    this.busy = true;
    clearTimeout(this.timer);
    await this.saving;
    const body = { request_id: this.submitting, seconds: this.seconds, ...more };
    const path = `assignments/${this.item.assignment}/${what}`;
    const done = await this.guarded(() => insist("POST", path, body, () => this.waiting()));
    this.busy = false;
    if (!done) return;
    if (done.kind === "late") this.toast("Your time for this item had run out and somebody else has it. Your answer is kept apart.");
    this.live.textContent = what === "skip" ? "Skipped" : "Submitted";
    this.item = null;
    await this.next();
  }

  async undo() {
    if (this.busy) return;
    if (this.item && this.past.length) {
      const state = this.past.pop();
      this.typed(state);
      this.page.restore(clone(state));
      this.live.textContent = "Undone";
      return;
    }
    await this.flush();
    const body = { request_id: requestId() };
    const done = await this.guarded(() => insist("POST", `tasks/${this.task}/undo`, body, () => this.waiting()));
    if (!done) return;
    if (!done.undone) return this.toast("There is nothing to undo");
    this.item = null;
    await this.next();
    this.toast("Your last answer is open again");
  }

  key(event) {
    if (this.dialog.open || event.ctrlKey || event.metaKey || event.altKey) {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.dialog.open) this.submit();
      return;
    }
    if (isTyping(event.target)) {
      if (event.key === "Escape") this.page?.focus(true);
      return;
    }
    const pressed = event.target instanceof HTMLElement && event.target.closest("button, a, summary, input");
    if (pressed && (event.key === "Enter" || event.key === " ")) return;
    const common = { enter: () => this.submit(), u: () => this.undo(), s: () => this.skip(), "?": () => this.showHelp(),
      g: () => this.showGuidelines() };
    const action = common[event.key.toLowerCase()];
    if (action) action();
    else if (!this.item || !this.page.key(event)) return;
    event.preventDefault();
  }

  tick() {
    if (this.item && !document.hidden && Date.now() - (this.lastActive ?? Date.now()) < 120_000) this.seconds += 1;
  }

  showHelp() {
    const rows = [...this.module.help, ...COMMON_HELP].map(([key, text]) => h("tr", {}, h("th", {}, h("kbd", {}, key)), h("td", {}, text)));
    this.sheet("Keys", h("table", { class: "keys" }, rows));
  }

  showGuidelines() {
    const text = this.guidelines || "<p>The lead has not written guidelines for this task.</p>";
    this.sheet("Guidelines", h("div", { class: "markdown", html: text }));
  }

  sheet(title, content) {
    const close = h("button", { type: "button", class: "primary", onclick: () => this.dialog.close() }, "Close");
    this.dialog.replaceChildren(h("h2", {}, title), content, close);
    this.dialog.showModal();
  }

  waiting() {
    this.saved.textContent = "No connection: trying again…";
  }

  async guarded(action) {
    try {
      return await action();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.refused(error);
      return null;
    }
  }

  refused(error) {
    if (error.status === 401) {
      this.sheet("Signed out", h("p", {}, "Your session has ended. Your draft is kept: ",
        h("a", { href: `/login?next=${encodeURIComponent(`/?task=${this.task}`)}` }, "sign in again"), "."));
      return;
    }
    this.toast(error.message);
    if (error.status === 409 || error.status === 404) this.next();
  }

  toast(text) {
    this.toastBox.textContent = text;
    this.toastBox.hidden = false;
    clearTimeout(this.toastTimer);
    this.toastTimer = setTimeout(() => (this.toastBox.hidden = true), 4000);
  }
}
