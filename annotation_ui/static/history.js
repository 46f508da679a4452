// My work: the labeler's submitted answers, newest first. One can be opened and changed; it counts as it is until then.

import { setAddress } from "./address.js";
import { h } from "./dom.js";

const help = () => [["↑ ↓", "select an answer"], ["Enter", "edit the answer"], ["← →", "newer or older answers"],
  ["W or Esc", "back to labeling"]];

const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

// Shows one page of submitted answers in the workbench; `newer` holds the positions of the pages before this one.
export async function openHistory(workbench, how, before = null, newer = []) {
  const turn = workbench.takeTurn();
  workbench.setBusy(true);
  await workbench.drafts.save();
  workbench.deciding = null;
  const page = await workbench.ask("GET", before === null ? "history" : `history?before=${before}`);
  if (turn !== workbench.turn) return;
  if (!page) return workbench.stay();
  workbench.leaveItem({ help });
  setAddress(`?task=${workbench.task}&work`, how);
  workbench.history = mountHistory(workbench.frame.stage, page, {
    open: (row) => reopen(workbench, row),
    older: () => openHistory(workbench, "pushState", page.rows.at(-1).judgment, [...newer, before]),
    newer: newer.length ? () => openHistory(workbench, "pushState", newer.at(-1), newer.slice(0, -1)) : null,
    leave: () => workbench.show(workbench.task),
  });
  workbench.root.scrollTo(0, 0);
  workbench.history.focus();
}

async function reopen(workbench, row) {
  const opened = await workbench.ask("POST", `assignments/${row.assignment}/reopen`, {});
  if (opened) await (opened.deciding ? workbench.decide(row.task, null) : workbench.show(row.task));
}

// `page`: {rows, more}; `actions`: {open(row), newer() or null, older(), leave()}.
function mountHistory(root, page, actions) {
  const entries = page.rows.map((row) => h("button", { type: "button", class: "work-row", "data-assignment": row.assignment,
    onclick: () => actions.open(row) },
    h("span", { class: "work-task" }, row.title),
    h("span", { class: "work-prompt" }, row.prompt || "–"),
    h("span", { class: "work-answer" }, row.answer),
    h("time", { datetime: new Date(row.at * 1000).toISOString() }, day.format(row.at * 1000), row.edited ? " · edited" : "")));
  const button = (name, sign, action, shown) => h("button", { type: "button", "data-action": name, hidden: !shown, onclick: action }, sign);
  const nothing = h("p", { class: "hint" }, "You have not submitted anything yet.");
  root.append(h("div", { class: "my-work" },
    h("div", { class: "row" }, h("h2", {}, "My work"), h("span", { class: "grow" }),
      h("button", { type: "button", "data-action": "leave", onclick: actions.leave }, "Back to labeling ", h("kbd", {}, "W"))),
    h("p", { class: "hint" }, "Open an answer to edit it. The old answer counts until you submit the new one. All versions are kept."),
    entries.length ? h("ol", { class: "work-list" }, entries.map((entry) => h("li", {}, entry))) : nothing,
    h("div", { class: "row" }, button("newer", "← Newer", actions.newer, Boolean(actions.newer)), h("span", { class: "grow" }),
      button("older", "Older →", actions.older, page.more))));

  function step(by) {
    const at = entries.indexOf(document.activeElement);
    entries[Math.max(0, Math.min(at + by, entries.length - 1))]?.focus();
  }

  const keys = { arrowdown: () => step(1), arrowup: () => step(-1), w: actions.leave, escape: actions.leave,
    arrowright: () => page.more && actions.older(), arrowleft: () => actions.newer?.() };
  return {
    focus: () => entries[0]?.focus({ preventScroll: true }),
    key(event) {
      const action = keys[event.key.toLowerCase()];
      action?.();
      return Boolean(action);
    },
  };
}
