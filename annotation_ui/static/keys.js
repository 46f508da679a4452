// The keyboard of the labelers' page. Keys between Enter and the next item are kept for that item.

import { h, isTyping } from "./dom.js";

export const help = [["Enter", "submit"], ["U", "undo the last change, then reopen the last answer"],
  ["S", "skip this item (S S: without a reason)"], ["R", "switch between raw and rendered text"], ["W", "my work"],
  ["G", "guidelines"], ["?", "show this help"]];

// Lists of [key, what it does] as one table.
export const helpTable = (...lists) => h("table", { class: "keys" }, lists.flat().map(([key, text]) =>
  h("tr", {}, h("th", {}, h("kbd", {}, key)), h("td", {}, text))));

const MAX_AHEAD = 50;

// The letter or digit that a US keyboard has at a key, if the layout has a letter of another alphabet or a digit behind Shift
// there; else the key as it is.
export function keyName({ key, code = "", shiftKey }) {
  if (key.length !== 1 || /[a-z0-9]/i.test(key)) return key;
  const letter = key > "\x7f" && /^Key([A-Z])$/.exec(code);
  const digit = !shiftKey && /^Digit([0-9])$/.exec(code);
  return (letter || digit)?.[1]?.toLowerCase() ?? key;
}

export class Keys {
  constructor(workbench) {
    this.workbench = workbench;
    this.ahead = [];
    document.addEventListener("keydown", (event) => this.press(event));
    workbench.root.addEventListener("click", (event) => this.clicked(event));
  }

  press(event) {
    const { workbench } = this;
    if (event.isComposing || document.querySelector("dialog[open]")) return;
    const enter = event.key === "Enter";
    if (event.ctrlKey || event.metaKey || event.altKey) {
      if (enter && (event.ctrlKey || event.metaKey)) workbench.submit();
      return;
    }
    if (workbench.busy) return this.keepForNext(event);
    const { target } = event;
    if (isTyping(target)) {
      if (event.key === "Escape") workbench.page?.focus(true);
      else if (enter && target.tagName === "INPUT") workbench.submit();
      return;
    }
    const named = { key: keyName(event), repeat: event.repeat, target };
    if (workbench.history ? this.pressInHistory(named) : this.pressAtItem(named)) event.preventDefault();
  }

  pressInHistory(event) {
    if (event.key === "?") this.workbench.showHelp();
    else if (event.key === "Enter") return false;
    else return this.workbench.history.key(event);
    return true;
  }

  // Enter submits wherever the focus is, but for buttons and links that do something else, if Tab has led there.
  pressAtItem(event) {
    const { workbench } = this;
    const command = event.target instanceof HTMLElement && event.target.closest('a, summary, button:not([role="radio"], .chip)');
    if (command && event.key === "Enter") return false;
    if (workbench.item && workbench.page.key(event)) return true;
    const action = { enter: () => workbench.submit(), u: () => workbench.undo(event.repeat), s: () => workbench.skip(), r: () => workbench.frame.toggleRaw(),
      g: () => workbench.showGuidelines(), w: () => workbench.showHistory(), "?": () => workbench.showHelp() }[event.key.toLowerCase()];
    if (!event.repeat || event.key.toLowerCase() === "u") action?.(); // a key that is held decides one item, not the next ones
    return Boolean(action);
  }

  // After a click on a control the keyboard is the item's again, so that Enter submits and does not repeat the click.
  clicked(event) {
    const control = event.target.closest(".task :is(button, summary, input[type=checkbox]), .actions button, .top [data-action=raw]");
    if (event.detail && control && !this.workbench.busy && !isTyping(document.activeElement)) this.workbench.page?.focus(true);
  }

  keepForNext(event) {
    event.preventDefault();
    const leaves = /^(Enter|Escape|Tab)$/.test(event.key);
    if (!event.repeat && !leaves && this.ahead.length < MAX_AHEAD) this.ahead.push({ key: keyName(event), text: event.key });
  }

  replay() {
    for (const { key, text } of this.ahead.splice(0)) {
      if (isTyping(document.activeElement)) text.length === 1 && document.execCommand("insertText", false, text);
      else if (!/^[usw?g]$/i.test(key)) this.pressAtItem({ key }); // nobody decides an item that was not shown yet
    }
  }

  forget() {
    this.ahead.length = 0;
  }
}
