// The labelers' page: which task, the open item, drafts, undo, skip, submit, help. What is asked and answered is the
// business of the tasks' own modules, each with: help, empty(view), missing(state, view), mount(root, view, context).

import { Refused, call, clone, h, insist, isTyping, requestId } from "./dom.js";
import { Frame } from "./frame.js";
import { help as historyHelp, mountHistory } from "./history.js";
import * as compare from "./compare.js";
import * as demonstrate from "./demonstrate.js";
import * as probe from "./probe.js";
import * as rank from "./rank.js";
import * as rules from "./rules.js";

const MODULES = { rank, rules, demonstrate, probe, compare };
const COMMON_HELP = [["Enter", "submit"], ["U", "undo, also what was submitted last"], ["S", "skip this item"],
  ["W", "my work"], ["G", "guidelines"], ["?", "this help"]];
const DRAFT_PAUSE = 300; // ms between the last change and its saving
const RENEW_EVERY = 60_000; // ms: an open page keeps its item
const MOST_PAST = 50; // steps that undo goes back within one item

export async function start(element) {
  const root = element.querySelector(".workbench");
  const known = await call("GET", "tasks");
  const asked = new URLSearchParams(location.search);
  const open = known.tasks.find((task) => task.open)?.name ?? "rank";
  const workbench = new Workbench(root, known);
  workbench.task = MODULES[asked.get("task")] ? asked.get("task") : open;
  if (asked.has("work")) workbench.showHistory();
  else workbench.show(workbench.task);
}

class Workbench {
  constructor(root, known) {
    this.root = root;
    this.known = known;
    this.item = null;
    this.saving = Promise.resolve();
    this.frame = new Frame(root, known, {
      task: (name) => this.show(name), history: () => this.showHistory(), guidelines: () => this.showGuidelines(),
      help: () => this.showHelp(), undo: () => this.undo(), skip: () => this.skip(), submit: () => this.submit() });
    document.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("visibilitychange", () => document.hidden && this.flush(true));
    window.addEventListener("pagehide", () => this.flush(true));
    setInterval(() => this.tick(), 1000);
    setInterval(() => this.item && !document.hidden && this.save(), RENEW_EVERY);
  }

  async show(task) {
    await this.flush();
    this.task = task;
    this.frame.showTab(task);
    history.replaceState(null, "", `?task=${task}`);
    await this.next();
  }

  async next() {
    const task = this.task;
    this.history = null;
    const page = await this.guarded(() => insist("POST", `tasks/${task}/next`, {}, () => this.waiting()));
    if (!page || task !== this.task) return;
    this.guidelines = page.guidelines;
    this.frame.count.textContent = `${page.done} done`;
    this.frame.saved.textContent = "";
    this.item = page.item;
    this.module = MODULES[task];
    this.frame.actions.hidden = !page.item;
    this.frame.actions.querySelector('[data-action="skip"] span').textContent = page.item?.changing ? "Keep as it was" : "Skip";
    this.frame.stage.replaceChildren();
    if (!page.item) {
      this.page = null;
      this.frame.stage.append(h("div", { class: "nothing" }, h("h2", {}, "Nothing to do here"),
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
    if (item.changing) this.frame.stage.append(h("p", { class: "notice" }, "You are changing an answer. It counts as it was until you submit."));
    const box = this.frame.stage.appendChild(h("div", { class: "task" }));
    this.page = this.module.mount(box, item.view, {
      state: clone(this.state),
      assignment: item.assignment,
      transcript: item.transcript,
      others: item.others,
      changed: (state, said) => this.changed(state, said),
      typed: (state) => this.typed(state),
      submit: () => this.submit(),
      toast: (text) => this.frame.toast(text),
    });
    this.root.scrollTo(0, 0);
    this.page.focus();
    this.showProblem();
  }

  // One step that undo takes back.
  changed(state, said) {
    this.past = [...this.past, this.state].slice(-MOST_PAST);
    this.typed(state);
    if (said) this.frame.live.textContent = said;
  }

  // Typing in a field, which has an undo of its own.
  typed(state) {
    this.state = clone(state);
    this.dirty = true;
    this.lastActive = Date.now();
    this.frame.saved.textContent = "Saving…";
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.save(), DRAFT_PAUSE);
    this.showProblem();
  }

  showProblem() {
    this.frame.problem.textContent = this.module.missing(this.state, this.item.view) ?? "";
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
        this.frame.saved.textContent = answer.held ? "Saved" : "Saved; this item has gone to somebody else";
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
    if (problem) return this.frame.toast(problem);
    await this.handIn("submit", { answer: this.state });
  }

  async skip() {
    if (!this.item || this.busy) return;
    if (!this.item.changing) return this.handIn("skip", { reason: "" });
    await this.flush();
    const path = `assignments/${this.item.assignment}/keep`;
    if (await this.guarded(() => insist("POST", path, {}, () => this.waiting()))) this.showHistory();
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
    if (done.kind === "late") this.frame.toast("Your time for this item had run out and somebody else has it. Your answer is kept apart.");
    this.frame.live.textContent = what === "skip" ? "Skipped" : "Submitted";
    const { changing } = this.item;
    this.item = null;
    await (changing ? this.showHistory() : this.next());
  }

  // A page of what was handed in; `newer` holds where the pages before this one began.
  async showHistory(before = null, newer = []) {
    await this.flush();
    const path = before === null ? "history" : `history?before=${before}`;
    const page = await this.guarded(() => insist("GET", path, undefined, () => this.waiting()));
    if (!page) return;
    this.item = null;
    this.module = { help: historyHelp };
    this.frame.showTab(null);
    history.replaceState(null, "", `?task=${this.task}&work`);
    this.frame.actions.hidden = true;
    this.frame.count.textContent = this.frame.saved.textContent = "";
    this.frame.stage.replaceChildren();
    this.history = mountHistory(this.frame.stage, page, {
      open: (row) => this.reopen(row),
      older: () => this.showHistory(page.rows.at(-1).judgment, [...newer, before]),
      newer: newer.length ? () => this.showHistory(newer.at(-1), newer.slice(0, -1)) : null,
      leave: () => this.show(this.task),
    });
    this.root.scrollTo(0, 0);
    this.history.focus();
  }

  async reopen(row) {
    const path = `assignments/${row.assignment}/reopen`;
    if (await this.guarded(() => insist("POST", path, {}, () => this.waiting()))) await this.show(row.task);
  }

  async undo() {
    if (this.busy) return;
    if (this.item && this.past.length) {
      const state = this.past.pop();
      this.typed(state);
      this.page.restore(clone(state));
      this.frame.live.textContent = "Undone";
      return;
    }
    if (this.item?.changing) return this.frame.toast("There is nothing to undo. S keeps your answer as it was.");
    await this.flush();
    const body = { request_id: requestId() };
    const done = await this.guarded(() => insist("POST", `tasks/${this.task}/undo`, body, () => this.waiting()));
    if (!done) return;
    if (!done.undone) return this.frame.toast("There is nothing to undo");
    this.item = null;
    await this.next();
    this.frame.toast("Your last answer is open again");
  }

  key(event) {
    if (this.frame.dialog.open || event.ctrlKey || event.metaKey || event.altKey) {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.frame.dialog.open) this.submit();
      return;
    }
    if (isTyping(event.target)) {
      if (event.key === "Escape") this.page?.focus(true);
      return;
    }
    if (this.history) {
      if (event.key === "?") this.showHelp();
      else if (!this.history.key(event)) return;
      event.preventDefault();
      return;
    }
    const pressed = event.target instanceof HTMLElement && event.target.closest("button, a, summary, input");
    if (pressed && (event.key === "Enter" || event.key === " ")) return;
    const common = { enter: () => this.submit(), u: () => this.undo(), s: () => this.skip(), "?": () => this.showHelp(),
      g: () => this.showGuidelines(), w: () => this.showHistory() };
    const action = common[event.key.toLowerCase()];
    if (action) action();
    else if (!this.item || !this.page.key(event)) return;
    event.preventDefault();
  }

  tick() {
    if (this.item && !document.hidden && Date.now() - (this.lastActive ?? Date.now()) < 120_000) this.seconds += 1;
  }

  showHelp() {
    const rows = [...this.module.help, ...(this.history ? [] : COMMON_HELP)].map(([key, text]) => h("tr", {}, h("th", {}, h("kbd", {}, key)), h("td", {}, text)));
    this.frame.sheet("Keys", h("table", { class: "keys" }, rows));
  }

  showGuidelines() {
    const text = this.guidelines || "<p>The lead has not written guidelines for this task.</p>";
    this.frame.sheet("Guidelines", h("div", { class: "markdown", html: text }));
  }

  waiting() {
    this.frame.saved.textContent = "No connection: trying again…";
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
      this.frame.sheet("Signed out", h("p", {}, "Your session has ended. Your draft is kept: ",
        h("a", { href: `/login?next=${encodeURIComponent(`/?task=${this.task}`)}` }, "sign in again"), "."));
      return;
    }
    this.frame.toast(error.message);
    if (error.status === 409 || error.status === 404) this.next();
  }
}
