// A text whose parts can be selected and marked. Offsets count code points. The text has a caret, which moves as in a text
// field, whatever its direction; it cannot be changed.

import { h } from "./dom.js";

const COLORS = 9; // .mark-0 to .mark-8

export class MarkedText {
  // `clicked(offset)`: a click that selects nothing.
  constructor(label, text, clicked) {
    this.characters = Array.from(text);
    this.element = h("div", { class: "marked-text", role: "textbox", "aria-label": label, "aria-multiline": "true", "aria-readonly": "true",
      contenteditable: "true", spellcheck: "false", inputmode: "none", dir: "auto", tabindex: "0", "data-readonly": "",
      onbeforeinput: (event) => event.preventDefault(),
      ondrop: (event) => event.preventDefault(),
      oninput: () => this.show(this.spans, true), // what an input method changed all the same
      onclick: () => {
        const place = this.place();
        if (place && place.start === place.end) clicked(place.start);
      } });
  }

  // The text of a span.
  part(span) {
    return this.characters.slice(span.start, span.end).join("");
  }

  // What is selected, without spaces around it; null if that is nothing.
  selected() {
    const place = this.place();
    if (!place) return null;
    let { start, end } = place;
    while (start < end && !this.characters[start].trim()) start += 1;
    while (end > start && !this.characters[end - 1].trim()) end -= 1;
    return start < end ? { start, end } : null;
  }

  // The selection in code points, if it is within the text.
  place() {
    const selection = document.getSelection();
    if (!selection.rangeCount) return null;
    const range = selection.getRangeAt(0);
    if (!this.element.contains(range.startContainer) || !this.element.contains(range.endContainer)) return null;
    const before = document.createRange();
    before.selectNodeContents(this.element);
    const offset = (node, at) => {
      before.setEnd(node, at);
      return Array.from(before.toString()).length;
    };
    return { start: offset(range.startContainer, range.startOffset), end: offset(range.endContainer, range.endOffset) };
  }

  placeCaret(offset) {
    let left = offset;
    for (const piece of this.element.childNodes) {
      const length = Array.from(piece.textContent).length;
      if (left <= length) {
        const within = Array.from(piece.textContent).slice(0, left).join("").length;
        document.getSelection().collapse(piece.firstChild, within);
        return;
      }
      left -= length;
    }
  }

  // `spans`: [{start, end, at, color, chosen}] in the order of the text. The text is cut where one begins or ends.
  show(spans, always = false) {
    const shown = JSON.stringify(spans.map(({ start, end, color, chosen, at }) => [start, end, color, chosen, at]));
    if (shown === this.shown && !always) return;
    const caret = this.element === document.activeElement ? this.place() : null;
    this.shown = shown;
    this.spans = spans;
    const cuts = [...new Set([0, this.characters.length, ...spans.flatMap(({ start, end }) => [start, end])])].sort((one, two) => one - two);
    this.element.replaceChildren(...cuts.slice(0, -1).map((start, at) => this.piece(start, cuts[at + 1])));
    if (caret) this.placeCaret(caret.end);
  }

  piece(start, end) {
    const covering = this.spans.filter((span) => span.start <= start && end <= span.end);
    const element = h("span", {}, this.part({ start, end }));
    if (!covering.length) return element;
    element.className = covering.some((span) => span.chosen) ? "piece chosen" : "piece";
    element.dataset.spans = covering.map((span) => span.at).join(" ");
    // A bar below the text for each mark, so that each of several can be seen.
    const bar = (span, at) => `linear-gradient(var(--mark-${span.color % COLORS}) 0 0) 0 calc(100% - ${at * 4}px) / 100% 3px no-repeat`;
    element.style.background = covering.map(bar).join(", ");
    element.style.backgroundColor = "var(--maybe-wash)";
    element.style.paddingBottom = `${covering.length * 4 - 2}px`;
    return element;
  }

  // Brings a mark into view.
  reveal(at) {
    [...this.element.children].find((piece) => piece.dataset.spans?.split(" ").includes(String(at)))?.scrollIntoView({ block: "nearest" });
  }
}
