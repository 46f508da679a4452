// The keyboard of the labelers' page. Keys between Enter and the next item are kept for that item.

import { isTyping } from "./dom.js";

const MAX_AHEAD = 50;

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
    if (workbench.history ? this.pressInHistory(event) : this.pressAtItem(event)) event.preventDefault();
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
    const action = { enter: () => workbench.submit(), u: () => workbench.undo(), s: () => workbench.skip(), r: () => workbench.toggleRaw(),
      g: () => workbench.showGuidelines(), w: () => workbench.showHistory(), "?": () => workbench.showHelp() }[event.key.toLowerCase()];
    action?.();
    return Boolean(action);
  }

  // After a click on a control the keyboard is the item's again, so that Enter submits and does not repeat the click.
  clicked(event) {
    const control = event.target.closest(".task :is(button, summary, input[type=checkbox]), .actions button, .top [data-action=raw]");
    if (event.detail && control && !this.workbench.busy && !isTyping(document.activeElement)) this.workbench.page?.focus(true);
  }

  keepForNext(event) {
    event.preventDefault();
    const decides = /^(Enter|Escape|Tab|[usw?g])$/i.test(event.key); // nobody decides an item that is not shown yet
    if (!event.repeat && !decides && this.ahead.length < MAX_AHEAD) this.ahead.push(event.key);
  }

  replay() {
    for (const key of this.ahead.splice(0)) {
      if (!isTyping(document.activeElement)) this.pressAtItem({ key });
      else if (key.length === 1) document.execCommand("insertText", false, key);
    }
  }

  forget() {
    this.ahead.length = 0;
  }
}
