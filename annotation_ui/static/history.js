// My work: what the labeler handed in, newest first. Opening one changes it; until that is submitted it counts as it is.

import { h } from "./dom.js";

export const help = [["↑ ↓", "choose an answer"], ["Enter", "open it to change it"], ["← →", "newer, older"],
  ["W or Esc", "back to labelling"]];

const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

// `page`: {rows, more}; `actions`: {open(row), newer() or null, older(), leave()}.
export function mountHistory(root, page, actions) {
  const lines = page.rows.map((row) => h("button", { type: "button", class: "work-row", "data-assignment": row.assignment,
    onclick: () => actions.open(row) },
    h("span", { class: "work-task" }, row.title),
    h("span", { class: "work-prompt" }, row.prompt || "–"),
    h("span", { class: "work-said" }, row.said),
    h("time", { datetime: new Date(row.at * 1000).toISOString() }, day.format(row.at * 1000), row.edited ? " · changed" : "")));
  const button = (name, sign, action, shown) => h("button", { type: "button", "data-action": name, hidden: !shown, onclick: action }, sign);
  const nothing = h("p", { class: "hint" }, "You have not handed in anything yet.");
  root.append(h("div", { class: "my-work" },
    h("div", { class: "row" }, h("h2", {}, "My work"), h("span", { class: "grow" }),
      h("button", { type: "button", "data-action": "leave", onclick: actions.leave }, "Back to labelling ", h("kbd", {}, "W"))),
    h("p", { class: "hint" }, "Open an answer to change it. It counts as it is until you submit the change; every version is kept."),
    lines.length ? h("ol", { class: "work-list" }, lines.map((line) => h("li", {}, line))) : nothing,
    h("div", { class: "row" }, button("newer", "← Newer", actions.newer, Boolean(actions.newer)), h("span", { class: "grow" }),
      button("older", "Older →", actions.older, page.more))));

  function step(by) {
    const at = lines.indexOf(document.activeElement);
    lines[Math.max(0, Math.min(at + by, lines.length - 1))]?.focus();
  }

  const keys = { arrowdown: () => step(1), arrowup: () => step(-1), w: actions.leave, escape: actions.leave,
    arrowright: () => page.more && actions.older(), arrowleft: () => actions.newer?.() };
  return {
    focus: () => lines[0]?.focus({ preventScroll: true }),
    key(event) {
      const action = keys[event.key.toLowerCase()];
      action?.();
      return Boolean(action);
    },
  };
}
