// The labelers' page: the chosen task, the open item, drafts, undo, skip, submit, help. The module tasks/NAME.js of each
// task shows its questions and answers. It exports help(view), empty(view), missing(state, view) and mount(root, view, context),
// and if it needs them answer(state, view), what is submitted, and summary(state), one line about what is answered so far.

import { readAddress, setAddress } from "./address.js";
import { RefusedError, call, callUntilAnswered, clone, h, onSignedOut, requestId, retryText } from "./dom.js";
import { SignIn, askForSkip } from "./dialogs.js";
import { Drafts } from "./drafts.js";
import { Frame } from "./frame.js";
import { openHistory } from "./history.js";
import { Keys, help, helpTable } from "./keys.js";
import { decisionBanner, deletedNotice, guidelinesNotice, markRead, lostNotice, noDisagreement, nothingToDo, otherWindowNotice, showLesson, submittedNotice } from "./notices.js";

const RENEW_EVERY = 60_000; // ms; an open page keeps its item
const MAX_UNDO_STEPS = 50; // within one item
const CHOOSE_FIRST = "First choose above which version to keep.";

export async function start(element) {
  const root = element.querySelector(".workbench");
  const account = await callUntilAnswered("GET", "tasks", undefined, (error) => root.replaceChildren(h("p", { class: "nothing" }, retryText(error))));
  const signIn = new SignIn(account.user);
  onSignedOut(() => signIn.ask());
  const modules = await Promise.all(account.tasks.map((task) => import(`./tasks/${task.name}.js`)));
  await new Workbench(root, account, Object.fromEntries(account.tasks.map((task, at) => [task.name, modules[at]]))).followAddress();
}

class Workbench {
  constructor(root, account, modules) {
    this.root = root;
    this.account = account;
    this.modules = modules; // by the name of the task
    this.item = null;
    this.frame = new Frame(root, account, {
      task: (name) => this.show(name), history: () => this.showHistory(), guidelines: () => this.showGuidelines(),
      help: () => this.showHelp(), undo: () => this.undo(), skip: () => this.skip(), submit: () => this.submit() });
    this.drafts = new Drafts({
      saved: () => this.frame.showStatus("Saved"), unsaved: () => this.frame.showStatus("Saving…"), held: (isHeld) => this.showHeld(isHeld),
      retrying: (error) => this.frame.showStatus(retryText(error)), elsewhere: () => this.showElsewhere(),
      refused: (error) => (error.status === 409 ? this.showSubmitted(error) : this.showRefusal(error)) });
    this.keys = new Keys(this);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.drafts.save(true) : this.drafts.renew()));
    window.addEventListener("pagehide", () => this.drafts.save(true));
    window.addEventListener("popstate", () => this.followAddress());
    for (const kind of ["pointerdown", "keydown", "wheel"]) document.addEventListener(kind, () => (this.lastActive = Date.now()), { capture: true, passive: true });
    setInterval(() => this.countSeconds(), 1000);
    setInterval(() => document.hidden || this.drafts.renew(), RENEW_EVERY);
  }

  // Shows what the address names; the browser's back button changes only the address.
  async followAddress() {
    const { task, work, decides, item } = readAddress(this.account);
    this.frame.dialog.close();
    if (decides) return this.decide(task, item);
    if (!work) return this.show(task, "replaceState");
    this.task = task;
    return this.showHistory("replaceState");
  }

  async show(task, how = "pushState") {
    this.setBusy(true);
    await this.drafts.save();
    this.deciding = null;
    this.task = task;
    this.frame.showTab(task);
    setAddress(`?task=${task}`, how);
    await this.next();
  }

  // A lead decides disagreements: a certain item first if one is named, then the worst that is left.
  async decide(task, item) {
    this.setBusy(true);
    await this.drafts.save();
    this.task = task;
    this.frame.showTab(task);
    this.deciding = { item };
    await this.next();
  }

  // After a request, a method continues only if no other one has taken its turn meanwhile.
  takeTurn() {
    return (this.turn = {});
  }

  async next() {
    const task = this.task;
    const turn = this.takeTurn();
    this.history = null;
    this.setBusy(true);
    const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
    const [path, body] = this.deciding ? [`decide/${task}/next`, this.deciding] : [`tasks/${task}/next`, { midnight }];
    const page = await this.ask("POST", path, body);
    if (turn !== this.turn) return;
    this.setBusy(false);
    if (!page) return;
    if (this.deciding) {
      this.deciding = { item: null };
      setAddress(`?task=${task}&decide`, "replaceState");
    }
    this.guidelines = page.guidelines;
    this.version = page.version; // of the guidelines
    this.unread = page.unread;
    this.banner = page.deciding ? decisionBanner(page.deciding) : guidelinesNotice(page.unread, () => this.showGuidelines());
    this.frame.showCounts(page.counts, page.deciding);
    this.frame.showStatus("");
    this.item = page.item;
    this.module = this.modules[task];
    this.frame.actions.hidden = !page.item;
    this.frame.actions.querySelector('[data-action="skip"] span').textContent = page.item?.changing ? "Cancel edit" : "Skip";
    this.frame.stage.replaceChildren();
    if (page.item) return this.open(page.item);
    this.page = null;
    this.keys.forget();
    call("GET", "tasks").then(({ tasks }) => this.frame.showOpen(tasks), () => {}); // a batch may have been opened meanwhile
    if (page.deciding) return this.frame.stage.append(noDisagreement());
    if (this.banner) this.frame.stage.append(this.banner);
    this.frame.stage.append(nothingToDo(this.account.lead, () => this.next(), () => this.undo()));
  }

  open(item) {
    const stored = this.drafts.open(item);
    const carried = this.carried?.assignment === item.assignment ? this.carried : null;
    const { state = {}, past = [] } = carried ?? stored ?? {};
    this.state = { ...this.module.empty(item.view), ...state };
    this.past = past;
    this.seconds = Math.max(stored?.seconds ?? 0, this.drafts.keptSeconds()); // from before a reload, or another device
    this.lastActive = this.counted = Date.now();
    this.drafts.content = { state: this.state, past, seconds: this.seconds };
    if (carried) this.drafts.change(this.drafts.content);
    this.touched = Boolean(carried);
    this.carried = null;
    this.submitId = requestId();
    if (this.banner) this.frame.stage.append(this.banner);
    if (item.changing && !this.deciding) this.frame.stage.append(h("p", { class: "notice changing" }, "You are editing a submitted answer. The old answer counts until you submit the new one."));
    const box = this.frame.stage.appendChild(h("div", { class: "task" }));
    this.page = this.module.mount(box, item.view, {
      state: clone(this.state),
      assignment: item.assignment,
      transcript: item.transcript,
      others: item.others,
      changed: (state, announcement) => box.isConnected && this.changed(state, announcement), // no reply is late for another item
      typed: (state) => box.isConnected && this.typed(state),
      announce: (text) => (this.frame.live.textContent = text),
      submit: () => this.submit(),
      toast: (text) => this.frame.toast(text),
    });
    this.root.scrollTo(0, 0);
    this.page.focus();
    this.showProblem();
    this.keys.replay();
  }

  // Clears the page of the item, for what `module` (of which the help is shown) puts there.
  leaveItem(module) {
    this.item = this.page = this.drafts.item = null;
    this.setBusy(false);
    this.keys.forget();
    this.module = module;
    this.frame.showTab(null);
    this.frame.actions.hidden = true;
    this.frame.showCounts(null);
    this.frame.showStatus("");
    this.frame.stage.replaceChildren();
  }

  // While an answer or another page is on its way, the item cannot be changed any more: the change would be lost.
  setBusy(busy) {
    this.busy = busy;
    this.frame.stage.inert = busy;
  }

  // The item stays, after all; keys that were typed for the next one are not for it.
  stay() {
    this.setBusy(false);
    this.keys.forget();
    this.page?.focus(true);
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
    this.touched = true; // here, not in another window or before a reload
    this.lastActive = Date.now();
    this.drafts.change({ state: this.state, past: this.past, seconds: this.seconds });
    this.showProblem();
  }

  showProblem() {
    const lines = [this.module.summary?.(this.state), this.module.missing(this.state, this.item.view)];
    this.frame.problem.textContent = lines.filter(Boolean).join(" · ");
  }

  async submit() {
    if (!this.item || this.busy) return;
    const problem = this.drafts.replaced ? CHOOSE_FIRST : this.module.missing(this.state, this.item.view);
    if (problem) return this.frame.toast(problem);
    await this.sendAnswer("submit", { guidelines: this.version, answer: this.module.answer?.(this.state, this.item.view) ?? this.state });
  }

  async skip() {
    if (!this.item || this.busy) return;
    if (this.drafts.replaced) return this.frame.toast(CHOOSE_FIRST);
    if (!this.item.changing) return askForSkip(this.frame, (reason) => this.sendAnswer("skip", { reason }));
    await this.drafts.save();
    const path = `assignments/${this.item.assignment}/keep`;
    if (await this.ask("POST", path, {})) this.showHistory();
  }

  async sendAnswer(what, more) {
    const turn = this.takeTurn();
    this.setBusy(true);
    await this.drafts.settle();
    const body = { request_id: this.submitId, seconds: this.seconds, ...more };
    const path = `assignments/${this.item.assignment}/${what}`;
    const done = await this.ask("POST", path, body, (error) => this.showSubmitted(error));
    if (done?.kind === "late") this.frame.toast("Your time on this item ran out, and it was assigned to another labeler. Your answer is stored but does not count.");
    if (turn !== this.turn) return;
    if (!done) {
      this.stay();
      return void this.drafts.resume();
    }
    this.drafts.close();
    this.frame.live.textContent = what === "skip" ? "Skipped" : "Submitted";
    const changing = this.item.changing && !this.deciding;
    this.item = null;
    if (done.lesson) await showLesson(this.frame, done.lesson);
    if (turn === this.turn) await (changing ? this.showHistory() : this.next());
  }

  // A busy browser calls this late: what counts is the time that has passed, though not that of a computer asleep.
  countSeconds() {
    const now = Date.now();
    const passed = (now - this.counted) / 1000;
    this.counted = now;
    if (this.item && !document.hidden && now - this.lastActive < 120_000) this.drafts.keepSeconds(this.seconds += Math.max(0, Math.min(passed, 10)));
  }

  showHistory(how = "pushState") {
    return openHistory(this, how);
  }

  // A key that is held takes back steps within the item, but no submission.
  async undo(held = false) {
    if (this.busy) return;
    if (this.item && this.past.length) {
      const state = this.past.pop();
      this.typed(state);
      this.page.restore(clone(state));
      this.frame.live.textContent = "Undone";
      return;
    }
    if (held) return;
    if (this.item?.changing) return this.frame.toast("Nothing to undo. Press S to keep your submitted answer.");
    const turn = this.takeTurn();
    this.setBusy(true);
    await this.drafts.save();
    const done = await this.ask("POST", `tasks/${this.task}/undo`, { request_id: requestId() });
    if (turn !== this.turn) return;
    if (!done?.undone) {
      if (done) this.frame.toast("Nothing to undo");
      return this.stay();
    }
    this.setBusy(false);
    this.item = null;
    await (done.deciding ? this.decide(this.task, null) : this.next());
    this.frame.toast("Reopened your last answer");
  }

  showHelp() {
    this.frame.showDialog("Keyboard shortcuts", helpTable(this.module.help(this.item?.view), this.history ? [] : help));
  }

  showGuidelines() {
    const text = this.guidelines || "<p>This task has no guidelines yet.</p>";
    this.frame.showDialog("Guidelines", h("div", { class: "markdown", html: text }));
    if (this.unread) markRead(this.unread);
    this.unread = null;
    this.frame.stage.querySelector(".guidelines-notice")?.remove();
  }

  showElsewhere() {
    this.frame.showStatus("Not saved");
    this.frame.notice("elsewhere", ...otherWindowNotice(() => {
      this.frame.dropNotice(); // at once: a second click would go on from a draft that is no longer the newest
      this.page.focus(true);
      this.drafts.takeOver();
    }, () => this.leaveDraft()));
  }

  // Another window has submitted or skipped the item; what was done in this one stays until the labeler decides.
  showSubmitted(error) {
    if (!this.touched) return this.showRefusal(error);
    this.drafts.stop();
    this.frame.showStatus("Not saved");
    if (error.deleted) return this.frame.notice("deleted", ...deletedNotice(error.message, () => this.leaveDraft()));
    this.frame.notice("submitted", ...submittedNotice(async () => {
      const { item, state, past } = this;
      if (!(await this.ask("POST", `assignments/${item.assignment}/reopen`, {}, (error) => this.frame.toast(error.message)))) return;
      this.carried = { assignment: item.assignment, state, past };
      this.leaveDraft();
    }, () => this.leaveDraft()));
  }

  // Somebody else has the item, or (the other one skipped it) this labeler has it again.
  showHeld(isHeld) {
    if (isHeld) this.frame.dropNotice("lost");
    else this.frame.notice("lost", ...lostNotice(() => this.leaveDraft()));
  }

  leaveDraft() {
    this.drafts.close();
    return this.next();
  }

  // The server's answer, however long it takes; null if it refuses, which the page then shows. `conflict(error)` is called
  // instead where the item is in another state than this window assumes.
  async ask(method, path, body, conflict) {
    const { turn } = this;
    try {
      return await callUntilAnswered(method, path, body, (error) => this.frame.showStatus(retryText(error)));
    } catch (error) {
      if (!(error instanceof RefusedError)) throw error;
      if (error.status === 409 && conflict && turn === this.turn) conflict(error);
      else this.showRefusal(error, turn);
      return null;
    }
  }

  showRefusal(error, turn = this.turn) {
    this.frame.toast(error.message);
    if ((error.status === 409 || error.status === 404) && turn === this.turn) this.leaveDraft();
  }
}
