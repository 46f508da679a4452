// What the page says above an item (new guidelines, a lead's decision, another window), where there is none, and after a
// training item: its known answer.

import { BASE, call, h } from "./dom.js";

// `unread`: the id of the guidelines that this labeler has not opened; `read()` opens them.
export function guidelinesNotice(unread, read) {
  if (!unread) return null;
  return h("p", { class: "notice guidelines-notice", role: "status" }, "There are guidelines here that you have not read yet. ",
    h("button", { type: "button", "data-action": "read-guidelines", onclick: read }, "Read them"));
}

export const markRead = (unread) => call("POST", `guidelines/${unread}/read`, {}).catch(() => {}); // asked again with the next item

// `deciding`: {left, agreement, item}, as /api/decide returns it.
export function decisionBanner(deciding) {
  const agreement = deciding.agreement === null ? "" : `, on which labelers agree to ${Math.round(100 * deciding.agreement)} %`;
  const left = deciding.left === 1 ? "1 disagreement is left." : `${deciding.left} disagreements are left.`;
  return h("p", { class: "notice decision", role: "status" }, h("b", {}, "You decide"), ` item ${deciding.item}${agreement}. Your answer counts instead of theirs. `,
    left, " ", h("a", { href: `${BASE}/lead/` }, "Stop deciding"));
}

// What `Frame.notice` shows where work is at risk; each action is [its name, what the button says, what it does].
const warning = (text, ...actions) => [text, ...actions.map(([name, says, act]) =>
  h("button", { type: "button", "data-action": name, onclick: act }, says))];

export const otherWindowNotice = (takeOver, load) => warning("You changed this item in another window. What you do in this one is not saved.",
  ["take-over", "Go on with what this window shows", takeOver], ["load", "Show the other version", load]);

export const submittedNotice = (change, next) => warning("You submitted this item in another window. What you wrote here is not saved.",
  ["change", "Change the submitted answer to this", change], ["next", "Go to the next item", next]);

export const deletedNotice = (message, next) => warning(`${message[0].toUpperCase()}${message.slice(1)}.`, ["next", "Go to the next item", next]);

export const lostNotice = (next) => warning("Your time for this item ran out, and somebody else has it now. An answer would be stored, but not counted.",
  ["next", "Go to the next item", next]);

// `lead`: whether a lead looks, who gets no labelers' items.
export function nothingToDo(lead, again, undo) {
  if (lead) return h("div", { class: "nothing" }, h("h2", {}, "Nothing to do here"),
    h("p", {}, "Leads get no labelers' items: to do both, use two accounts. What there is to decide is among the disagreements."),
    h("a", { href: `${BASE}/lead/` }, "To the lead's page"));
  return h("div", { class: "nothing" }, h("h2", {}, "Nothing to do here"),
    h("p", {}, "There are no items of this task left for you. Another task may have some, or the lead may add more."),
    h("button", { type: "button", onclick: again }, "Check again"), " ",
    h("button", { type: "button", "data-action": "undo", onclick: undo }, "Undo the last answer"));
}

export function noDisagreement() {
  return h("div", { class: "nothing" }, h("h2", {}, "No disagreement is left"),
    h("p", {}, "You have decided or skipped every item of this task on which labelers differ."),
    h("a", { href: `${BASE}/lead/` }, "Back to the lead's page"));
}

// `lesson`: {agreement, known, own, explanation}; resolves when the labeler has closed it.
export function showLesson(frame, lesson) {
  const right = lesson.agreement === 1;
  const verdict = right ? "Your answer is the known one." : `Your answer agrees to ${Math.round(100 * (lesson.agreement ?? 0))} % with the known one.`;
  const row = (name, text) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, text));
  frame.showDialog(right ? "Right" : "Not quite", h("div", { class: "lesson" }, h("p", {}, verdict),
    h("table", { class: "keys" }, row("Known answer", lesson.known), row("Your answer", lesson.own)),
    lesson.explanation ? h("div", { class: "markdown", html: lesson.explanation }) : null,
    h("p", { class: "hint" }, "This was a training item: it is not counted as work.")));
  return new Promise((closed) => frame.dialog.addEventListener("close", closed, { once: true }));
}
