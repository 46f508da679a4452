// Rank: the responses stay in place while the labeler reads; the board next to them shows the order.

import { Board, letter } from "../ranking/board.js";
import { conversation, h, radioGroup, written } from "../dom.js";
import { differenceView } from "../diff.js";
import { dense, move, place, slots, tiers, tieWithAbove } from "../ranking/places.js";

const VIEWS = [["list", "List"], ["two", "Two columns"], ["single", "One at a time"]];
const VIEW = "align-rank-view"; // remembered in this browser

const FLAG_KEYS = "abcdeghijklmnopqrstuvwxyz"; // without f, which closes them

export const help = () => [
  ["← →", "select a response"],
  ["1 – 9", "set its rank; equal ranks are ties"],
  ["↑ ↓", "move it up or down, or out of a tie"],
  ["T", "tie it with the response above"],
  ["Backspace", "remove it from the board"],
  ["Q, then 1 – 7", "rate its quality (Q, then 0: clear)"],
  ["F, then a letter", "set its flags (F or Esc to close)"],
  ["V", "switch the view: list, two columns, one at a time"],
  ["C", "comment (Esc to leave)"],
  ["E", "write a better response, starting from the selected one (Esc to leave)"],
];

export function empty(view) {
  const size = view.responses.length;
  return { ranks: Array(size).fill(null), ratings: Array(size).fill(null), flags: Array.from({ length: size }, () => []), comment: "", better: "" };
}

export function missing(state, view) {
  const same = view.responses.findIndex((response) => response.text.replace(/\r\n?/g, "\n") === state.better);
  if (state.better && same >= 0) return `Your better response equals response ${letter(same)}. Edit or remove it.`;
  const unplaced = state.ranks.flatMap((rank, index) => (rank === null ? [letter(index)] : []));
  return unplaced.length ? `Not ranked: ${unplaced.join(", ")}` : null;
}

// The order as text, such as "B > A = C".
const orderText = (ranks) => tiers(ranks).map((group) => group.map(letter).join(" = ")).join(" > ");

export const summary = (state) => orderText(state.ranks);

// What is submitted: places without the empty slots between them.
export const answer = (state) => ({ ...state, ranks: dense(state.ranks) });

export const mount = (root, view, context) => new Ranking(root, view, context);

class Ranking {
  constructor(root, view, context) {
    this.view = view;
    this.context = context;
    this.state = context.state;
    this.chosen = 0;
    this.mode = null; // "quality" or "flags": what the next key is for
    this.board = new Board({ ranks: () => this.state.ranks, setRanks: (ranks, index) => this.setRanks(ranks, index),
      choose: (index) => this.choose(index, false), beginning: (index) => this.cards[index].beginning });
    this.cards = view.responses.map((response, index) => new Card(this, response, index));
    this.comment = h("textarea", { class: "note", rows: "2", maxlength: "2000", "aria-label": "Comment on the ranking",
      placeholder: "Comment. Quote the text, because letters differ between labelers.", oninput: () => this.typeComment() });
    this.better = new BetterAnswer(this);
    this.views = new Views(this);
    root.append(h("div", { class: "columns" },
      h("div", { class: "reading" }, conversation(view.prompt), this.views.bar, this.views.cards, this.better.element),
      h("aside", { class: "side" }, labelersOrders(context.others), h("h2", {}, "Your order"),
        h("p", { class: "hint" }, "Drag a letter to a rank, onto another letter for a tie, or between two. The best is at the top."),
        this.board.list, this.board.tray, this.comment)));
    this.show();
  }

  change(next, announcement) {
    this.state = { ...this.state, ...next };
    this.context.changed(this.state, announcement);
    this.show();
  }

  typeComment() {
    this.state = { ...this.state, comment: this.comment.value };
    this.context.typed(this.state);
  }

  setRanks(ranks, index) {
    if (ranks.every((old, other) => old === this.state.ranks[other])) return; // nothing changed: no undo step
    const rank = ranks[index];
    const tied = rank === null ? [] : slots(ranks)[rank - 1].filter((other) => other !== index).map(letter);
    const where = rank === null ? "off the board" : `rank ${rank}${tied.length ? `, tied with ${tied.join(", ")}` : ""}`;
    this.change({ ranks }, `${letter(index)}: ${where}`);
  }

  setRating(index, rating) {
    this.change({ ratings: this.state.ratings.map((old, other) => (other === index ? rating : old)) },
      `${letter(index)}: quality ${rating ?? "none"}`);
  }

  toggleFlag(index, flag) {
    const old = this.state.flags[index];
    const flags = old.includes(flag) ? old.filter((other) => other !== flag) : [...old, flag];
    this.change({ flags: this.state.flags.map((other, at) => (at === index ? flags : other)) },
      `${letter(index)}: ${this.view.flags[flag]}, ${old.includes(flag) ? "removed" : "set"}`);
  }

  choose(index, focus = true) {
    this.chosen = (index + this.cards.length) % this.cards.length;
    this.mode = null;
    this.show();
    if (focus) this.cards[this.chosen].element.focus();
  }

  placeAndContinue(rank) {
    const wasUnplaced = this.state.ranks[this.chosen] === null;
    this.setRanks(place(this.state.ranks, this.chosen, rank), this.chosen);
    const unplaced = this.state.ranks.flatMap((each, index) => (each === null ? [index] : []));
    if (wasUnplaced && unplaced.length) this.choose(unplaced.find((index) => index > this.chosen) ?? unplaced[0]);
  }

  show() {
    const { ranks } = this.state;
    this.board.show(ranks, this.chosen);
    this.cards.forEach((card) => card.show(ranks, slots(ranks)));
    this.views.show(ranks, this.chosen);
    if (this.comment !== document.activeElement) this.comment.value = this.state.comment ?? "";
    this.better.show(this.state.better ?? "", this.chosen);
  }

  setMode(mode) {
    this.mode = mode;
    const { flags } = this.cards[this.chosen];
    if (mode === "flags") flags.open = true;
    else flags.open = this.state.flags[this.chosen].length > 0 && flags.open;
    if (mode === "quality") this.context.announce(`Quality of ${letter(this.chosen)}: press 1 to ${this.view.max_rating}`);
    this.show();
  }

  focus() {
    this.cards[this.chosen].element.focus({ preventScroll: true });
  }

  restore(next) {
    this.state = next;
    this.show();
  }

  // A key of the mode that Q or F began; another key ends the mode and keeps its own meaning.
  keyOfMode(key) {
    const { mode, chosen } = this;
    const flag = Object.keys(this.view.flags)[FLAG_KEYS.indexOf(key)];
    if (mode === "flags" && flag) {
      this.toggleFlag(chosen, flag);
      return true;
    }
    this.setMode(null);
    if (mode === "quality" && /^[0-9]$/.test(key) && Number(key) <= this.view.max_rating) this.setRating(chosen, Number(key) || null);
    else return key === "escape" || key === { quality: "q", flags: "f" }[mode];
    return true;
  }

  key(event) {
    const key = event.key.toLowerCase();
    if (this.mode && key !== "shift" && this.keyOfMode(key)) return this.reveal();
    const { ranks } = this.state;
    const { chosen } = this;
    const actions = { arrowright: () => this.choose(chosen + 1), arrowleft: () => this.choose(chosen - 1),
      arrowup: () => this.setRanks(move(ranks, chosen, -1), chosen), arrowdown: () => this.setRanks(move(ranks, chosen, 1), chosen),
      t: () => this.setRanks(tieWithAbove(ranks, chosen), chosen), backspace: () => this.setRanks(place(ranks, chosen, null), chosen),
      q: () => this.setMode("quality"), f: () => this.setMode("flags"), c: () => this.comment.focus(), e: () => this.better.write(), v: () => this.views.next() };
    if (/^[1-9]$/.test(key) && Number(key) <= this.cards.length) this.placeAndContinue(Number(key));
    else if (actions[key]) actions[key]();
    else return false;
    return key === "c" || key === "e" || this.reveal();
  }

  // Brings the chosen response into view, which the labeler may have scrolled away: keys act on it.
  reveal() {
    const { element } = this.cards[this.chosen];
    const { top, bottom } = element.getBoundingClientRect();
    if (bottom < 80 || top > innerHeight - 80) element.scrollIntoView({ block: "nearest" });
    return true;
  }
}

// The responses below each other, in two columns, or one at a time with a button for each.
class Views {
  constructor(ranking) {
    const { length } = ranking.view.responses;
    this.cards = h("div", {}, ranking.cards.map((card) => card.element));
    this.choice = radioGroup({ class: "view-choice", "aria-label": "View of the responses" }, VIEWS.map(([view, name]) => [view, name, { "data-view": view }]), (view) => this.choose(view));
    this.choice.element.append(h("kbd", { "aria-hidden": "true" }, "V"));
    this.letters = ranking.cards.map((_, index) => h("button", { type: "button", "data-letter": index, onclick: () => ranking.choose(index) }, letter(index)));
    this.bar = h("div", {}, h("h2", {}, `${length} responses`), h("span", { class: "grow" }), this.choice.element,
      h("div", { class: "letters", role: "group", "aria-label": "Responses" }, this.letters));
    this.choose(localStorage.getItem(VIEW) ?? "list");
  }

  choose(view) {
    this.view = VIEWS.some(([known]) => known === view) ? view : "list";
    localStorage.setItem(VIEW, this.view);
    this.choice.show(this.view);
    this.cards.className = `cards ${this.view}`;
    this.bar.className = `views ${this.view}`;
  }

  next() {
    this.choose(VIEWS[(VIEWS.findIndex(([view]) => view === this.view) + 1) % VIEWS.length][0]);
  }

  show(ranks, chosen) {
    this.letters.forEach((button, index) => {
      button.textContent = `${letter(index)}${ranks[index] === null ? "" : ` · ${ranks[index]}`}`;
      button.classList.toggle("done", ranks[index] !== null);
      button.setAttribute("aria-pressed", String(index === chosen));
    });
  }
}

// The labeler's own answer, where none of the responses is good.
class BetterAnswer {
  constructor(ranking) {
    this.ranking = ranking;
    this.open = false;
    this.text = h("textarea", { class: "writing", rows: "8", maxlength: "200000", dir: "auto", "aria-label": "Better response (Markdown)", oninput: () => {
      ranking.state = { ...ranking.state, better: this.text.value };
      ranking.context.typed(ranking.state);
      this.compare();
    } });
    this.title = h("h3", {});
    this.changes = differenceView("Your changes");
    this.begin = h("button", { type: "button", "data-action": "better", onclick: () => this.write() }, "Write a better response ", h("kbd", { "aria-hidden": "true" }, "E"));
    this.form = h("section", { class: "better", "aria-label": "Better response" },
      h("header", { class: "row" }, h("h3", {}, "Better response"), h("span", { class: "grow" }),
        h("button", { type: "button", class: "small", "data-action": "remove-better", onclick: () => this.remove() }, "Remove")),
      this.text, this.title, this.changes.element);
    this.element = h("div", { class: "better-answer" }, this.begin, this.form);
  }

  write() {
    const { ranking } = this;
    this.open = true; // also while nothing is written
    if (!ranking.state.better) ranking.change({ better: ranking.view.responses[ranking.chosen].text }, "Writing a better response");
    this.text.focus();
    this.element.scrollIntoView({ block: "nearest" });
  }

  remove() {
    this.open = false;
    this.ranking.change({ better: "" }, "Removed the better response");
    this.ranking.focus();
  }

  show(better, chosen) {
    const writing = this.open || Boolean(better);
    this.begin.hidden = writing;
    this.form.hidden = !writing;
    if (this.text.value !== better) this.text.value = better;
    this.source = chosen;
    if (writing) this.compare();
  }

  compare() {
    this.title.textContent = `Compared with ${letter(this.source)}`;
    this.changes.show(this.ranking.view.responses[this.source].text, this.text.value);
  }
}

// One response with its place, quality and flags.
class Card {
  constructor(ranking, response, index) {
    this.ranking = ranking;
    this.index = index;
    this.badge = h("span", { class: "rank-badge" });
    const handle = h("span", { class: "handle", title: "Drag to the board", "aria-hidden": "true" }, "⠿");
    ranking.board.draggable(handle, index);
    this.places = radioGroup({ class: "places", "aria-label": `Rank of ${letter(index)}` },
      ranking.view.responses.map((_, at) => [at + 1, String(at + 1), { "aria-label": `Rank ${at + 1}` }]), (rank) => this.choosePlace(rank));
    this.ratings = radioGroup({ class: "ratings", "aria-label": `Overall quality of ${letter(index)}` },
      Array.from({ length: ranking.view.max_rating }, (_, at) =>
        [at + 1, String(at + 1), { "aria-label": `Quality ${at + 1} of ${ranking.view.max_rating}` }]), (rating) => this.chooseRating(rating));
    this.ratings.element.prepend(h("span", { class: "label" }, "Quality"));
    this.flags = this.flagList();
    const text = written(response);
    text.classList.add("clamp");
    const more = h("button", { class: "link more", type: "button", hidden: true, onclick: () => {
      more.textContent = text.classList.toggle("clamp") ? "Show all" : "Show less";
    } }, "Show all");
    this.beginning = text.textContent.trim().slice(0, 60);
    this.element = h("section", { class: "card", tabindex: "0", "data-card": index,
      onfocus: () => ranking.chosen !== index && ranking.choose(index, false) },
      h("header", {}, handle, h("h3", {}, letter(index)), this.places.element, this.badge), text, more,
      h("footer", {}, this.ratings.element, this.flags));
    new ResizeObserver(() => {
      if (text.classList.contains("clamp")) more.hidden = text.scrollHeight <= text.clientHeight + 2;
    }).observe(text);
  }

  choosePlace(rank) {
    const { ranking, index } = this;
    ranking.choose(index, false);
    ranking.setRanks(place(ranking.state.ranks, index, ranking.state.ranks[index] === rank ? null : rank), index);
  }

  chooseRating(rating) {
    const { ranking, index } = this;
    ranking.choose(index, false);
    ranking.setRating(index, ranking.state.ratings[index] === rating ? null : rating);
  }

  flagList() {
    const { ranking, index } = this;
    this.boxes = Object.entries(ranking.view.flags).map(([flag, text], at) => {
      const box = h("input", { type: "checkbox", "data-flag": flag, onchange: () => ranking.toggleFlag(index, flag) });
      return { flag, box, label: h("label", {}, box, " ", text, " ", h("kbd", { "aria-hidden": "true" }, FLAG_KEYS[at])) };
    });
    this.title = h("summary", {}, "Flags");
    return h("details", { class: "flags" }, this.title, this.boxes.map((each) => each.label));
  }

  show(ranks, allSlots) {
    const { ranking, index } = this;
    const rank = ranks[index];
    const tied = rank !== null && allSlots[rank - 1].length > 1;
    const chosen = index === ranking.chosen;
    const flags = ranking.state.flags[index];
    this.element.classList.toggle("chosen", chosen);
    this.element.setAttribute("aria-label", `Response ${letter(index)}, ${rank === null ? "not ranked" : `rank ${rank}${tied ? ", tied" : ""}`}`);
    this.badge.textContent = rank === null ? "not ranked" : `${rank}${tied ? " tied" : ""}`;
    this.badge.classList.toggle("placed", rank !== null);
    this.places.show(rank);
    this.ratings.show(ranking.state.ratings[index]);
    this.ratings.element.classList.toggle("asked", chosen && ranking.mode === "quality");
    this.flags.classList.toggle("asked", chosen && ranking.mode === "flags");
    for (const { flag, box } of this.boxes) box.checked = flags.includes(flag);
    this.title.textContent = flags.length ? `Flags (${flags.length})` : "Flags";
  }
}

// For an adjudicating lead: how the labelers ordered the same responses.
function labelersOrders(others) {
  if (!others?.length) return null;
  return h("section", { class: "others" }, h("h2", {}, "Labelers' answers"),
    h("ul", {}, others.map((other) => h("li", {}, h("code", {}, orderText(other.answer.ranks)), ` ${other.labeler}`,
      other.answer.comment ? h("p", { class: "hint" }, other.answer.comment) : null))));
}
