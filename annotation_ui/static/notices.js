// What the page says above an item (new guidelines, a lead's decision, another window), where there is none, and after a
// training item: its known answer.

import { BASE, call, h } from "./dom.js";

// `unread`: the id of the guidelines that this labeler has not opened; `read()` opens them.
export function guidelinesNotice(unread, read) {
  if (!unread) return null;
  return h("p", { class: "notice guidelines-notice", role: "status" }, "This task has new guidelines. ",
    h("button", { type: "button", "data-action": "read-guidelines", onclick: read }, "Read guidelines"));
}

export const markRead = (unread) => call("POST", `guidelines/${unread}/read`, {}).catch(() => {}); // asked again with the next item

// `deciding`: {left, agreement, item}, as /api/decide returns it.
export function decisionBanner(deciding) {
  const agreement = deciding.agreement === null ? "" : ` (agreement ${Math.round(100 * deciding.agreement)} %)`;
  const left = deciding.left === 1 ? "1 disagreement left." : `${deciding.left} disagreements left.`;
  return h("p", { class: "notice decision", role: "status" }, h("b", {}, "Your decision"), ` on item ${deciding.item}${agreement} replaces the labelers' answers. `,
    left, " ", h("a", { href: `${BASE}/lead/` }, "Stop deciding"));
}

// What `Frame.notice` shows where work is at risk; each action is [its name, what the button says, what it does].
const warning = (text, ...actions) => [text, ...actions.map(([name, says, act]) =>
  h("button", { type: "button", "data-action": name, onclick: act }, says))];

export const otherWindowNotice = (takeOver, load) => warning("You edited this item in another window. Changes in this window are not saved.",
  ["take-over", "Keep this version", takeOver], ["load", "Load the other version", load]);

export const submittedNotice = (change, next) => warning("You submitted this item in another window. Changes in this window are not saved.",
  ["change", "Replace the submitted answer", change], ["next", "Go to the next item", next]);

export const deletedNotice = (message, next) => warning(`${message[0].toUpperCase()}${message.slice(1)}.`, ["next", "Go to the next item", next]);

export const lostNotice = (next) => warning("Your time on this item ran out, and it was assigned to another labeler. An answer is stored but does not count.",
  ["next", "Go to the next item", next]);

// `lead`: whether a lead looks, who gets no labelers' items.
export function nothingToDo(lead, again, undo) {
  if (lead) return h("div", { class: "nothing" }, h("h2", {}, "Nothing to do here"),
    h("p", {}, "Leads are not assigned items. To label, use a second account. Disagreements to decide are on the lead's page."),
    h("a", { href: `${BASE}/lead/` }, "Open the lead's page"));
  return h("div", { class: "nothing" }, h("h2", {}, "Nothing to do here"),
    h("p", {}, "You have no items left in this task. Try another task, or check again later."),
    h("button", { type: "button", onclick: again }, "Check again"), " ",
    h("button", { type: "button", "data-action": "undo", onclick: undo }, "Undo the last answer"));
}

export function noDisagreement() {
  return h("div", { class: "nothing" }, h("h2", {}, "No disagreements left"),
    h("p", {}, "You have decided or skipped every item of this task on which labelers disagree."),
    h("a", { href: `${BASE}/lead/` }, "Back to the lead's page"));
}

// `lesson`: {agreement, known, own, explanation}; resolves when the labeler has closed it.
export function showLesson(frame, lesson) {
  const right = lesson.agreement === 1;
  const verdict = right ? "Your answer is correct." : `Your answer matches ${Math.round(100 * (lesson.agreement ?? 0))} % of the correct answer.`;
  const row = (name, text) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, text));
  frame.showDialog(right ? "Correct" : "Not quite", h("div", { class: "lesson" }, h("p", {}, verdict),
    h("table", { class: "keys" }, row("Correct answer", lesson.known), row("Your answer", lesson.own)),
    lesson.explanation ? h("div", { class: "markdown", html: lesson.explanation }) : null,
    h("p", { class: "hint" }, "This was a training item. It does not count as work.")));
  return new Promise((closed) => frame.dialog.addEventListener("close", closed, { once: true }));
}
