// The draft of the open item: on the server shortly after each change. Until the server has it, this tab keeps it, too,
// so that it outlives a reload and a new sign-in.

import { RefusedError, call, requestId } from "./dom.js";

const PAUSE = 300; // ms without a change until the last one is sent
const LONGEST = 1000; // ms from a change until it is sent, however many follow it
const ROOM = 300_000; // characters of a draft, of which the server takes 1,000,000 bytes; undo steps that do not fit stay here
const ROOM_WHEN_LEAVING = 20_000; // a browser sends at most 64 kB of a page that is being left
const RETRY = 2000; // ms after a failure
const WINDOW = requestId(); // the server tells two windows with the same item apart

// A draft with as many of its newest undo steps as `room` characters hold.
function fitting({ state, past, seconds }, room) {
  let left = room - JSON.stringify(state).length;
  const first = past.findLastIndex((step) => (left -= JSON.stringify(step).length) < 0);
  return { state, past: past.slice(first + 1), seconds };
}

export class Drafts {
  // `report`: {saved(), held(isHeld), unsaved(), retrying(error), elsewhere(), refused(error)}.
  constructor(report) {
    this.report = report;
    this.saving = Promise.resolve();
    this.item = null;
    window.addEventListener("beforeunload", (event) => this.failed && event.preventDefault());
  }

  // The draft to go on with: the server's, or a later one that did not reach it.
  open(item) {
    this.item = item;
    this.dirty = this.failed = this.replaced = this.held = false;
    this.waiting = null; // since when a change has not been sent
    this.sequence = this.seen = item.sequence;
    const kept = JSON.parse(sessionStorage.getItem(this.place(item)) ?? "null");
    if (!(kept?.sequence > item.sequence)) return item.draft;
    this.sequence = kept.sequence;
    this.change(kept.draft);
    return kept.draft;
  }

  close() {
    clearTimeout(this.timer);
    if (this.item) for (const place of [this.place(this.item), this.clock(this.item)]) sessionStorage.removeItem(place);
    this.item = null;
    this.dirty = this.failed = this.replaced = false;
  }

  change(content) {
    this.content = content;
    this.dirty = true;
    if (this.replaced) return;
    this.report.unsaved();
    clearTimeout(this.timer);
    this.waiting ??= Date.now();
    this.timer = setTimeout(() => this.save(), Math.min(PAUSE, this.waiting + LONGEST - Date.now()));
  }

  // Sends one draft at a time with increasing numbers. The server keeps the highest, unless another window wrote one that
  // this window has not seen.
  save(keepalive = false) {
    clearTimeout(this.timer);
    if (!this.item || !this.dirty || this.replaced || this.held) return this.saving;
    this.dirty = false;
    this.waiting = null;
    this.sequence += 1;
    const { item } = this;
    const draft = { ...fitting(this.content, keepalive ? ROOM_WHEN_LEAVING : ROOM), window: WINDOW };
    const body = { draft, sequence: this.sequence, seen: this.seen };
    this.keep(item, body);
    this.saving = this.saving.then(() => this.send(item, body, keepalive && JSON.stringify(draft).length < ROOM_WHEN_LEAVING));
    return this.saving;
  }

  // Waits for the draft that is on its way and sends no other, because the answer itself follows; `resume` if it is refused.
  settle() {
    this.held = true;
    return this.saving;
  }

  resume() {
    this.held = false;
    return this.save();
  }

  // Keeps the lease of an open item, and finds out whether another window has changed it.
  renew() {
    const { item } = this;
    if (item && !this.held) this.saving = this.saving.then(() => this.send(item, { draft: {}, sequence: 0 }));
  }

  // Goes on in this window although another one has changed the item, up to the draft number `newest`.
  takeOver(newest = this.newest) {
    this.replaced = false;
    this.seen = this.sequence = newest;
    this.change(this.content);
    return this.save();
  }

  // Saves nothing more until the labeler has chosen what becomes of what this window shows.
  stop() {
    clearTimeout(this.timer);
    this.replaced = true;
  }

  async send(item, body, keepalive = false) {
    try {
      const answer = await call("PUT", `assignments/${item.assignment}/draft`, body, { keepalive });
      if (item !== this.item) return;
      this.failed = false;
      this.newest = answer.sequence;
      if (answer.stored) this.forget(item, body.sequence);
      if (!this.replaced) this.report.held(answer.held);
      if (answer.stored) {
        if (!this.dirty && body.sequence === this.sequence) this.report.saved(); // else a newer one is on its way
      } else if (body.sequence || answer.sequence > this.sequence) this.foundElsewhere();
    } catch (error) {
      if (item !== this.item) return;
      if (error instanceof RefusedError) return this.report.refused(error);
      if (!body.sequence) return;
      this.failed = this.dirty = true;
      this.report.retrying(error);
      this.timer = setTimeout(() => this.save(), RETRY);
    }
  }

  foundElsewhere() {
    this.stop();
    this.report.elsewhere();
  }

  // The active seconds of the open item. The next draft carries them to the server; until then they outlive a reload here.
  keepSeconds(seconds) {
    if (!this.item) return;
    this.content.seconds = seconds;
    try {
      sessionStorage.setItem(this.clock(this.item), String(seconds));
    } catch {
      // the tab's storage is full
    }
  }

  keptSeconds = () => Number(sessionStorage.getItem(this.clock(this.item)) ?? 0);

  clock = (item) => `align-seconds-${item.assignment}`;

  place = (item) => `align-draft-${item.assignment}`;

  keep(item, body) {
    try {
      sessionStorage.setItem(this.place(item), JSON.stringify(body));
    } catch {
      // the tab's storage is full: the draft still goes to the server
    }
  }

  forget(item, sequence) {
    const kept = JSON.parse(sessionStorage.getItem(this.place(item)) ?? "null");
    if (kept?.sequence === sequence) sessionStorage.removeItem(this.place(item));
  }
}
