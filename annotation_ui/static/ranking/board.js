// The board of Rank: a slot for each place, gaps between the slots, and a tray for responses that are not placed.

import { h } from "../dom.js";
import { makeDraggable } from "./drag.js";
import { insert, place, slots } from "./places.js";

export const letter = (index) => String.fromCharCode(65 + index);

const targetAt = (x, y) => document.elementFromPoint(x, y)?.closest("[data-gap],[data-slot],[data-tray]") ?? null;

// `actions`: {ranks(), setRanks(ranks, index), choose(index), beginning(index): of the response's text}.
export class Board {
  constructor(actions) {
    this.actions = actions;
    this.list = h("ol", { class: "board", "aria-label": "Your order, best first" });
    this.tray = h("div", { class: "tray", "data-tray": "1" });
  }

  // Lets an element carry a response to the board.
  draggable(element, index) {
    makeDraggable(element, letter(index), targetAt, (target) => this.drop(index, target));
    return element;
  }

  drop(index, { dataset: { gap, slot } }) {
    const ranks = this.actions.ranks();
    if (gap !== undefined) this.actions.setRanks(insert(ranks, index, Number(gap)), index);
    else this.actions.setRanks(place(ranks, index, slot === undefined ? null : Number(slot)), index);
    this.actions.choose(index);
  }

  chip(index) {
    return this.draggable(h("button", { class: "chip", type: "button", "data-response": index, tabindex: "-1",
      "aria-label": `Response ${letter(index)}`, onclick: () => this.actions.choose(index) },
      h("b", {}, letter(index)), h("span", { dir: "auto" }, this.actions.beginning(index))), index);
  }

  show(ranks, chosen) {
    const gap = (at) => h("li", { class: "gap", "data-gap": at, "aria-hidden": "true" });
    const slot = (group, at) => h("li", { class: `slot ${group.length ? "" : "free"}`, "data-slot": at + 1 },
      h("span", { class: "place" }, String(at + 1)), h("span", { class: "chips" }, group.map((index) => this.chip(index))));
    this.list.replaceChildren(gap(0), ...slots(ranks).flatMap((group, at) => [slot(group, at), gap(at + 1)]));
    const unplaced = ranks.flatMap((rank, index) => (rank === null ? [index] : []));
    this.tray.replaceChildren(h("span", { class: "label" }, unplaced.length ? "Not ranked" : "All ranked"),
      ...unplaced.map((index) => this.chip(index)));
    for (const box of [this.list, this.tray]) {
      for (const chip of box.querySelectorAll(".chip")) chip.classList.toggle("chosen", Number(chip.dataset.response) === chosen);
    }
  }
}
