// Mark errors: select parts of a response, with the mouse or with the keys of a text field, and give each a type.

import { conversation, h, written } from "../dom.js";
import { MarkedText } from "../marked_text.js";

export function help(view) {
  const types = (view?.types ?? ["error types"]).map((type, at) => `${at + 1} ${type}`).join(", ");
  return [["← → ↑ ↓", "move in the text (Shift: select, Ctrl: by word)"],
    ["1 – 9", `mark the selection, or change the type of the selected mark: ${types}`], ["J K", "select the next or previous mark"],
    ["Backspace", "remove the selected mark"], ["N", "note (Esc to leave)"], ["0", "no errors"]];
}

export function empty(view) {
  return { spans: view.spans, none: false };
}

export function missing(state) {
  return state.spans.length || state.none ? null : "Mark the errors, or choose No errors (0)";
}

export const summary = (state) => (state.spans.length ? `${state.spans.length} marked` : state.none ? "No errors" : "");

export const answer = (state) => ({ spans: state.spans });

export const mount = (root, view, context) => new SpanMarking(root, view, context);

class SpanMarking {
  constructor(root, view, context) {
    this.view = view;
    this.context = context;
    this.state = context.state;
    this.chosen = null; // a place in state.spans
    this.text = new MarkedText("Response. Select text to mark an error.", view.response.text, (at) => this.chooseAt(at));
    const buttons = view.types.map((type, at) => h("button", { type: "button", class: "error-type", "data-type": type,
      onmousedown: (event) => event.preventDefault(), // the selection stays
      onclick: () => this.mark(at) }, h("span", { class: `swatch mark-${at}` }), type, " ", h("kbd", { "aria-hidden": "true" }, at + 1)));
    this.none = h("button", { type: "button", "data-action": "none", onclick: () => this.confirmNone() }, "No errors ", h("kbd", { "aria-hidden": "true" }, "0"));
    this.list = h("ol", { class: "marks", "aria-label": "Marked errors" });
    this.note = h("textarea", { class: "note", rows: "2", maxlength: "2000", "aria-label": "Note on the selected mark",
      placeholder: "Note on the selected mark (optional)", oninput: () => this.typeNote() });
    const rendered = h("details", { class: "rendered" }, h("summary", {}, "Rendered response"), h("section", { class: "card" }, written(view.response)));
    root.append(h("div", { class: "columns" },
      h("div", { class: "reading" }, conversation(view.prompt), h("h2", {}, "Response"), this.text.element, rendered),
      h("aside", { class: "side" }, h("h2", {}, "Errors"),
        h("p", { class: "hint" }, "Select a part of the response, then choose an error type."),
        h("div", { class: "error-types", role: "group", "aria-label": "Mark the selection as" }, buttons, this.none), this.list, this.note,
        labelersMarks(context.others, view))));
    this.show();
  }

  change(next, announcement) {
    this.state = { ...this.state, ...next };
    this.context.changed(this.state, announcement);
    this.show();
  }

  // Marks what is selected, or gives the chosen mark this type.
  mark(number) {
    const type = this.view.types[number];
    const selected = this.text.selected();
    const { spans } = this.state;
    const old = selected ? null : spans[this.chosen];
    if (!selected && !old) return this.context.toast("Select a part of the response first");
    const span = { ...(old ?? selected), type };
    const same = spans.findIndex((each) => each.start === span.start && each.end === span.end && each.type === type);
    if (same >= 0) return this.choose(same);
    const next = old ? spans.map((each) => (each === old ? span : each)) : [...spans, span];
    this.chosen = next.indexOf(span);
    this.change({ spans: next, none: false }, `${type}: ${this.text.part(span)}`);
    this.text.placeCaret(span.end);
  }

  remove() {
    const span = this.state.spans[this.chosen];
    if (!span) return;
    this.chosen = null;
    this.change({ spans: this.state.spans.filter((each) => each !== span) }, `Removed: ${span.type}`);
  }

  confirmNone() {
    this.chosen = null;
    this.change({ spans: [], none: true }, "No errors");
  }

  typeNote() {
    const note = this.note.value;
    this.state = { ...this.state, spans: this.state.spans.map((each, at) => (at === this.chosen ? { ...each, note } : each)) };
    this.context.typed(this.state);
  }

  choose(at) {
    this.chosen = at;
    this.show();
    this.text.reveal(at);
  }

  // A click into the text: the shortest mark there, or the next longer one if that is chosen already.
  chooseAt(offset) {
    const { spans } = this.state;
    const here = this.order().filter((at) => spans[at].start <= offset && offset < spans[at].end)
      .sort((one, two) => spans[one].end - spans[one].start - spans[two].end + spans[two].start);
    this.chosen = here[(here.indexOf(this.chosen) + 1) % here.length] ?? null;
    this.show();
  }

  // The places in state.spans in the order of the text.
  order() {
    const { spans } = this.state;
    return spans.map((_, at) => at).sort((one, two) => spans[one].start - spans[two].start || spans[one].end - spans[two].end);
  }

  step(by) {
    const order = this.order();
    if (!order.length) return;
    const at = order.indexOf(this.chosen);
    this.choose(order[at < 0 ? (by > 0 ? 0 : order.length - 1) : (at + by + order.length) % order.length]);
  }

  show() {
    const { spans, none } = this.state;
    const order = this.order();
    this.text.show(order.map((at) => ({ ...spans[at], at, color: this.view.types.indexOf(spans[at].type), chosen: at === this.chosen })));
    this.list.replaceChildren(...order.map((at) => this.entry(spans[at], at)));
    this.none.setAttribute("aria-pressed", String(none));
    this.note.hidden = !spans[this.chosen];
    if (this.note !== document.activeElement) this.note.value = spans[this.chosen]?.note ?? "";
  }

  entry(span, at) {
    return h("li", { class: at === this.chosen ? "chosen" : "" },
      h("button", { type: "button", class: "mark", "data-at": at, tabindex: "-1", "aria-pressed": String(at === this.chosen), onclick: () => this.choose(at) },
        h("span", { class: `swatch mark-${this.view.types.indexOf(span.type)}` }), h("b", {}, span.type), h("q", { dir: "auto" }, this.text.part(span)),
        span.note ? h("small", {}, span.note) : null),
      h("button", { type: "button", class: "small", tabindex: "-1", "aria-label": `Remove ${span.type}`, onclick: () => { this.chosen = at; this.remove(); } }, "✕"));
  }

  focus() {
    this.text.element.focus({ preventScroll: true });
  }

  restore(next) {
    this.state = next;
    this.chosen = null;
    this.show();
  }

  key(event) {
    const key = event.key.toLowerCase();
    if (/^[1-9]$/.test(key)) this.view.types[Number(key) - 1] && this.mark(Number(key) - 1);
    else if (key === "0") this.confirmNone();
    else if (key === "j") this.step(1);
    else if (key === "k") this.step(-1);
    else if (key === "backspace" || key === "delete") this.remove();
    else if (key === "n" && this.state.spans[this.chosen]) this.note.focus();
    else return false;
    return true;
  }
}

// For an adjudicating lead: what the labelers marked.
function labelersMarks(others, view) {
  if (!others?.length) return null;
  const characters = Array.from(view.response.text);
  const part = (span) => characters.slice(span.start, span.end).join("");
  return h("section", { class: "others" }, h("h2", {}, "Labelers' answers"), others.map((other) => h("div", {}, h("b", {}, other.labeler),
    other.answer.spans.length ? h("ul", {}, other.answer.spans.map((span) => h("li", {}, `${span.type}: `, h("q", { dir: "auto" }, part(span))))) : " no errors")));
}
