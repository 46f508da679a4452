// The labelers' page: the chosen task, the open item, drafts, undo, skip, submit, help. Each task has a module of its own
// for the questions and answers, which exports help, empty(view), missing(state, view) and mount(root, view, context), and
// if it needs them answer(state), what is submitted, and summary(state), one line about what is answered so far.

import { RefusedError, call, callUntilAnswered, clone, h, isRaw, onSignedOut, requestId, toggleRaw } from "./dom.js";
import { SignIn, askForSkip } from "./dialogs.js";
import { Drafts } from "./drafts.js";
import { Frame } from "./frame.js";
import { help as historyHelp, mountHistory } from "./history.js";
import { Keys } from "./keys.js";
import { decisionBanner, guidelinesNotice, markRead, noDisagreement, nothingToDo, showLesson } from "./notices.js";
import * as compare from "./compare.js";
import * as demonstrate from "./demonstrate.js";
import * as probe from "./probe.js";
import * as rank from "./rank.js";
import * as rules from "./rules.js";

const MODULES = { rank, rules, demonstrate, probe, compare };
const COMMON_HELP = [["Enter", "submit"], ["U", "undo; with nothing to undo, reopen your last answer"], ["S", "skip this item, with a reason or without (S S)"],
  ["R", "texts as they were written, or rendered"], ["W", "my work"], ["G", "guidelines"], ["?", "this help"]];
const RENEW_EVERY = 60_000; // ms; an open page keeps its item
const MAX_UNDO_STEPS = 50; // within one item

export async function start(element) {
  const root = element.querySelector(".workbench");
  const account = await call("GET", "tasks");
  const signIn = new SignIn(account.user);
  onSignedOut(() => signIn.ask());
  await new Workbench(root, account).followAddress();
}

class Workbench {
  constructor(root, account) {
    this.root = root;
    this.account = account;
    this.item = null;
    this.frame = new Frame(root, account, {
      task: (name) => this.show(name), history: () => this.showHistory(), guidelines: () => this.showGuidelines(), raw: () => this.toggleRaw(),
      help: () => this.showHelp(), undo: () => this.undo(), skip: () => this.skip(), submit: () => this.submit() });
    this.frame.showRaw(isRaw());
    this.drafts = new Drafts({ saved: (held) => this.showSaved(held), unsaved: () => this.showStatus("Saving…"),
      noConnection: () => this.showNoConnection(), elsewhere: () => this.showElsewhere(), refused: (error) => this.showRefusal(error) });
    this.keys = new Keys(this);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.drafts.save(true) : this.drafts.renew()));
    window.addEventListener("pagehide", () => this.drafts.save(true));
    window.addEventListener("popstate", () => this.followAddress());
    setInterval(() => this.tick(), 1000);
    setInterval(() => document.hidden || this.drafts.renew(), RENEW_EVERY);
  }

  // Shows what the address names; the browser's back button changes only the address.
  async followAddress() {
    const parameters = new URLSearchParams(location.search);
    const firstOpen = this.account.tasks.find((task) => task.open)?.name ?? "rank";
    const task = MODULES[parameters.get("task")] ? parameters.get("task") : firstOpen;
    this.frame.dialog.close();
    if (parameters.has("decide") && this.account.lead) return this.decide(task, Number(parameters.get("decide")) || null);
    if (!parameters.has("work")) return this.show(task, "replaceState");
    this.task = task;
    return this.showHistory(null, [], "replaceState");
  }

  // `how`: pushState for a step that the back button takes back, replaceState otherwise.
  setAddress(address, how) {
    if (address !== location.search) history[how](null, "", address);
  }

  async show(task, how = "pushState") {
    await this.drafts.save();
    this.deciding = null;
    this.task = task;
    this.frame.showTab(task);
    this.setAddress(`?task=${task}`, how);
    await this.next();
  }

  // A lead decides disagreements: a certain item first if one is named, then the worst that is left.
  async decide(task, item) {
    await this.drafts.save();
    this.task = task;
    this.frame.showTab(task);
    this.deciding = { item };
    await this.next();
  }

  async next() {
    const task = this.task;
    this.history = null;
    this.busy = true;
    const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
    const [path, body] = this.deciding ? [`decide/${task}/next`, this.deciding] : [`tasks/${task}/next`, { midnight }];
    const page = await this.runOrShowRefusal(() => callUntilAnswered("POST", path, body, () => this.showNoConnection()));
    if (task !== this.task) return;
    this.setBusy(false);
    if (!page) return;
    if (this.deciding) {
      this.deciding = { item: null };
      this.setAddress(`?task=${task}&decide`, "replaceState");
    }
    this.guidelines = page.guidelines;
    this.unread = page.unread;
    this.banner = page.deciding ? decisionBanner(page.deciding) : guidelinesNotice(page.unread, () => this.showGuidelines());
    this.frame.showCounts(page.counts, page.deciding);
    this.showStatus("");
    this.item = page.item;
    this.module = MODULES[task];
    this.frame.actions.hidden = !page.item;
    this.frame.actions.querySelector('[data-action="skip"] span').textContent = page.item?.changing ? "Keep as it was" : "Skip";
    this.frame.stage.replaceChildren();
    if (page.item) return this.open(page.item);
    this.page = null;
    this.keys.forget();
    if (page.deciding) return this.frame.stage.append(noDisagreement());
    if (this.banner) this.frame.stage.append(this.banner);
    this.frame.stage.append(nothingToDo(() => this.next(), () => this.undo()));
  }

  open(item) {
    const draft = this.drafts.open(item) ?? {};
    this.state = { ...this.module.empty(item.view), ...(draft.state ?? {}) };
    this.past = draft.past ?? [];
    this.seconds = 0;
    this.submitId = requestId();
    if (this.banner) this.frame.stage.append(this.banner);
    if (item.changing && !this.deciding) this.frame.stage.append(h("p", { class: "notice" }, "You are changing an answer. The old answer counts until you submit."));
    const box = this.frame.stage.appendChild(h("div", { class: "task" }));
    this.page = this.module.mount(box, item.view, {
      state: clone(this.state),
      assignment: item.assignment,
      transcript: item.transcript,
      others: item.others,
      changed: (state, announcement) => this.changed(state, announcement),
      typed: (state) => this.typed(state),
      announce: (text) => (this.frame.live.textContent = text),
      submit: () => this.submit(),
      toast: (text) => this.frame.toast(text),
    });
    this.root.scrollTo(0, 0);
    this.page.focus();
    this.showProblem();
    this.keys.replay();
  }

  // While an answer is on its way, the item cannot be changed any more.
  setBusy(busy) {
    this.busy = busy;
    this.frame.stage.inert = busy;
  }

  // A change that is one undo step; `announcement` is read by screen readers.
  changed(state, announcement) {
    this.past = [...this.past, this.state].slice(-MAX_UNDO_STEPS);
    this.typed(state);
    if (announcement) this.frame.live.textContent = announcement;
  }

  // A change by typing in a field, which has its own undo.
  typed(state) {
    this.state = clone(state);
    this.lastActive = Date.now();
    this.drafts.change({ state: this.state, past: this.past });
    this.showProblem();
  }

  showProblem() {
    const { problem } = this.frame;
    const told = [this.module.summary?.(this.state), this.module.missing(this.state, this.item.view)];
    problem.textContent = told.filter(Boolean).join(" · ");
  }

  async submit() {
    if (!this.item || this.busy) return;
    const problem = this.module.missing(this.state, this.item.view);
    if (problem) return this.frame.toast(problem);
    await this.sendAnswer("submit", { answer: this.module.answer?.(this.state) ?? this.state });
  }

  async skip() {
    if (!this.item || this.busy) return;
    if (!this.item.changing) return askForSkip(this.frame, (reason) => this.sendAnswer("skip", { reason }));
    await this.drafts.save();
    const path = `assignments/${this.item.assignment}/keep`;
    if (await this.runOrShowRefusal(() => callUntilAnswered("POST", path, {}, () => this.showNoConnection()))) this.showHistory();
  }

  async sendAnswer(what, more) {
    this.setBusy(true);
    await this.drafts.settle();
    const body = { request_id: this.submitId, seconds: this.seconds, ...more };
    const path = `assignments/${this.item.assignment}/${what}`;
    const done = await this.runOrShowRefusal(() => callUntilAnswered("POST", path, body, () => this.showNoConnection()));
    if (!done) {
      this.setBusy(false);
      return void this.drafts.resume();
    }
    this.drafts.close();
    if (done.kind === "late") this.frame.toast("Your time for this item ran out and somebody else has it now. Your answer is stored, but not counted.");
    this.frame.live.textContent = what === "skip" ? "Skipped" : "Submitted";
    const changing = this.item.changing && !this.deciding;
    this.item = null;
    if (done.lesson) await showLesson(this.frame, done.lesson);
    await (changing ? this.showHistory() : this.next());
  }

  // One page of submitted answers; `newer` holds the positions of the pages before this one.
  async showHistory(before = null, newer = [], how = "pushState") {
    await this.drafts.save();
    this.deciding = null;
    const path = before === null ? "history" : `history?before=${before}`;
    const page = await this.runOrShowRefusal(() => callUntilAnswered("GET", path, undefined, () => this.showNoConnection()));
    if (!page) return;
    this.item = this.drafts.item = null;
    this.setBusy(false);
    this.keys.forget();
    this.module = { help: historyHelp };
    this.frame.showTab(null);
    this.setAddress(`?task=${this.task}&work`, how);
    this.frame.actions.hidden = true;
    this.frame.showCounts(null);
    this.showStatus("");
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
    const opened = await this.runOrShowRefusal(() => callUntilAnswered("POST", path, {}, () => this.showNoConnection()));
    if (opened) await (opened.deciding ? this.decide(row.task, null) : this.show(row.task));
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
    if (this.item?.changing) return this.frame.toast("There is nothing to undo. Press S to keep your answer as it was.");
    await this.drafts.save();
    const body = { request_id: requestId() };
    const done = await this.runOrShowRefusal(() => callUntilAnswered("POST", `tasks/${this.task}/undo`, body, () => this.showNoConnection()));
    if (!done) return;
    if (!done.undone) return this.frame.toast("There is nothing to undo");
    this.item = null;
    await (done.deciding ? this.decide(this.task, null) : this.next());
    this.frame.toast("Your last answer is open again");
  }

  tick() {
    if (this.item && !document.hidden && Date.now() - (this.lastActive ?? Date.now()) < 120_000) this.seconds += 1;
  }

  toggleRaw() {
    const raw = toggleRaw(this.root);
    this.frame.showRaw(raw);
    this.frame.live.textContent = raw ? "Texts as they were written" : "Texts rendered";
  }

  showHelp() {
    const rows = [...this.module.help, ...(this.history ? [] : COMMON_HELP)].map(([key, text]) => h("tr", {}, h("th", {}, h("kbd", {}, key)), h("td", {}, text)));
    this.frame.showDialog("Keys", h("table", { class: "keys" }, rows));
  }

  showGuidelines() {
    const text = this.guidelines || "<p>The lead has not written guidelines for this task.</p>";
    this.frame.showDialog("Guidelines", h("div", { class: "markdown", html: text }));
    if (this.unread) markRead(this.unread);
    this.unread = null;
    this.frame.stage.querySelector(".guidelines-notice")?.remove();
  }

  showStatus(text) {
    this.frame.saved.textContent = text;
  }

  showSaved(held) {
    if (!this.drafts.dirty) this.showStatus(held ? "Saved" : "Saved, but somebody else has this item now");
  }

  showNoConnection() {
    this.showStatus("No connection, trying again…");
  }

  showElsewhere() {
    this.showStatus("Not saved");
    this.frame.notice("You changed this item in another window. What you do in this one is not saved. ",
      h("button", { type: "button", "data-action": "take-over", onclick: async () => {
        await this.drafts.takeOver();
        this.frame.stage.querySelector(".notice.urgent")?.remove();
      } }, "Go on with what this window shows"), " ",
      h("button", { type: "button", "data-action": "load", onclick: () => {
        this.drafts.close();
        this.next();
      } }, "Show the other version"));
  }

  async runOrShowRefusal(action) {
    try {
      return await action();
    } catch (error) {
      if (!(error instanceof RefusedError)) throw error;
      this.showRefusal(error);
      return null;
    }
  }

  showRefusal(error) {
    this.frame.toast(error.message);
    if (error.status !== 409 && error.status !== 404) return;
    this.drafts.close();
    this.next();
  }
}
