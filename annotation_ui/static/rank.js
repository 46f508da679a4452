// Rank: the texts stay where they are while the labeler reads; the board beside them holds the order.

import { conversation, h } from "./dom.js";
import { draggable } from "./drag.js";
import { move, place, placeInGap, placeInTier, tiers, tieWithAbove, unplace } from "./ranking.js";

const letter = (index) => String.fromCharCode(65 + index);

export const help = [
  ["← →", "choose a response"],
  ["1 – 9", "put it on that place"],
  ["↑ ↓", "move it up or down"],
  ["T", "tie it with the one above"],
  ["Backspace", "take it off the board"],
];

export function empty(view) {
  const size = view.responses.length;
  return { ranks: Array(size).fill(null), ratings: Array(size).fill(null), flags: Array.from({ length: size }, () => []) };
}

export function missing(state) {
  const open = state.ranks.flatMap((rank, index) => (rank === null ? [letter(index)] : []));
  return open.length ? `Not placed yet: ${open.join(", ")}` : null;
}

export function mount(root, view, context) {
  let state = context.state;
  let chosen = 0;

  const board = h("ol", { class: "board", "aria-label": "Your order, best first" });
  const tray = h("div", { class: "tray", "data-tray": "1" });
  const cards = view.responses.map((response, index) => card(response, index));
  root.append(
    h(
      "div",
      { class: "columns" },
      h(
        "div",
        { class: "reading" },
        conversation(view.prompt),
        h("h2", {}, `${view.responses.length} responses`),
        h("div", { class: "cards" }, cards.map((each) => each.element)),
      ),
      h(
        "aside",
        { class: "side" },
        h("h2", {}, "Your order"),
        h("p", { class: "hint" }, "Drag a letter to its place, onto another one for a tie. Best on top."),
        board,
        tray,
        othersList(context.others),
      ),
    ),
  );

  function change(next, said) {
    state = { ...state, ...next };
    context.changed(state, said);
    show();
  }

  function setRanks(ranks, index) {
    if (ranks.every((rank, other) => rank === state.ranks[other])) return; // no step for undo to take back
    const placed = ranks[index];
    const group = tiers(ranks)[placed - 1] ?? [];
    const tied = group.filter((other) => other !== index).map(letter);
    const where = placed === null ? "off the board" : `place ${placed}${tied.length ? `, tied with ${tied.join(", ")}` : ""}`;
    change({ ranks }, `${letter(index)}: ${where}`);
  }

  function choose(index, focus = true) {
    chosen = (index + cards.length) % cards.length;
    if (focus) cards[chosen].element.focus({ preventScroll: false });
    show();
  }

  function placeAndGoOn(rank) {
    const wasOpen = state.ranks[chosen] === null;
    setRanks(place(state.ranks, chosen, rank), chosen);
    const open = state.ranks.map((each, index) => (each === null ? index : -1)).filter((index) => index >= 0);
    if (wasOpen && open.length) choose(open.find((index) => index > chosen) ?? open[0]);
  }

  function targetAt(x, y) {
    return document.elementFromPoint(x, y)?.closest("[data-gap],[data-tier],[data-tray]") ?? null;
  }

  function dropOn(index, target) {
    const { gap, tier } = target.dataset;
    if (gap !== undefined) setRanks(placeInGap(state.ranks, index, Number(gap)), index);
    else if (tier !== undefined) setRanks(placeInTier(state.ranks, index, Number(tier)), index);
    else setRanks(unplace(state.ranks, index), index);
    choose(index, false);
  }

  function chip(index) {
    const element = h("button", { class: "chip", type: "button", "data-response": index, tabindex: "-1",
      "aria-label": `Response ${letter(index)}`, onclick: () => choose(index) },
      h("b", {}, letter(index)), h("span", {}, cards[index].start));
    draggable(element, letter(index), targetAt, (target) => dropOn(index, target));
    return element;
  }

  function card(response, index) {
    const rank = h("span", { class: "rank-badge" });
    const handle = h("span", { class: "handle", title: "Drag to the board", "aria-hidden": "true" }, "⠿");
    draggable(handle, letter(index), targetAt, (target) => dropOn(index, target));
    const button = (name, sign, action) =>
      h("button", { class: "small", type: "button", title: name, "aria-label": `${name}: response ${letter(index)}`,
        onclick: () => { choose(index, false); action(); } }, sign);
    const text = h("div", { class: "markdown clamp", html: response.html });
    const more = h("button", { class: "link more", type: "button", hidden: true, onclick: () => {
      more.textContent = text.classList.toggle("clamp") ? "Show all" : "Show less";
    } }, "Show all");
    const scores = ratings(index);
    const flags = flagList(index);
    const element = h(
      "section",
      { class: "card", tabindex: "0", "data-card": index, onfocus: () => chosen !== index && choose(index, false) },
      h("header", {}, handle, h("h3", {}, letter(index)), rank, h("span", { class: "grow" }),
        button("Up", "↑", () => setRanks(move(state.ranks, index, -1), index)),
        button("Down", "↓", () => setRanks(move(state.ranks, index, 1), index)),
        button("Tie with the one above", "=", () => setRanks(tieWithAbove(state.ranks, index), index))),
      text,
      more,
      h("footer", {}, scores.element, flags.element),
    );
    requestAnimationFrame(() => (more.hidden = text.scrollHeight <= text.clientHeight + 2));
    return { element, rank, scores, flags, start: text.textContent.trim().slice(0, 60) };
  }

  function ratings(index) {
    const buttons = Array.from({ length: view.max_rating }, (_, each) =>
      h("button", { type: "button", role: "radio", "aria-label": `Quality ${each + 1} of ${view.max_rating}`, onclick: () => {
        const again = state.ratings[index] === each + 1;
        change({ ratings: state.ratings.map((old, other) => (other === index ? (again ? null : each + 1) : old)) });
      } }, String(each + 1)));
    const element = h("div", { class: "ratings", role: "radiogroup", "aria-label": `Overall quality of ${letter(index)}` },
      h("span", { class: "label" }, "Quality"), buttons);
    const show = () => buttons.forEach((button, each) => {
      button.setAttribute("aria-checked", String(state.ratings[index] === each + 1));
    });
    return { element, show };
  }

  function flagList(index) {
    const summary = h("summary", {}, "Flags");
    const boxes = Object.entries(view.flags).map(([flag, text]) => {
      const box = h("input", { type: "checkbox", "data-flag": flag, onchange: () => {
        const kept = state.flags[index].filter((other) => other !== flag);
        change({ flags: state.flags.map((old, other) => (other === index ? (box.checked ? [...kept, flag] : kept) : old)) });
      } });
      return { flag, box, label: h("label", {}, box, " ", text) };
    });
    const element = h("details", { class: "flags" }, summary, boxes.map((each) => each.label));
    const show = () => {
      boxes.forEach(({ flag, box }) => (box.checked = state.flags[index].includes(flag)));
      summary.textContent = state.flags[index].length ? `Flags (${state.flags[index].length})` : "Flags";
    };
    return { element, show };
  }

  function show() {
    const groups = tiers(state.ranks);
    const gap = (at) => h("li", { class: "gap", "data-gap": at, "aria-hidden": "true" });
    board.replaceChildren(
      gap(0),
      ...groups.flatMap((group, at) => [
        h("li", { class: "tier", "data-tier": at }, h("span", { class: "place" }, String(at + 1)),
          h("span", { class: "chips" }, group.map(chip))),
        gap(at + 1),
      ]),
    );
    const open = state.ranks.flatMap((rank, index) => (rank === null ? [index] : []));
    tray.replaceChildren(h("span", { class: "label" }, open.length ? "Not placed yet" : "All placed"), ...open.map(chip));
    board.classList.toggle("empty", groups.length === 0);
    cards.forEach(({ element, rank, scores, flags }, index) => {
      const at = state.ranks[index];
      const tied = at !== null && groups[at - 1].length > 1;
      element.classList.toggle("chosen", index === chosen);
      element.setAttribute("aria-label", `Response ${letter(index)}, ${at === null ? "not placed" : `place ${at}${tied ? ", tied" : ""}`}`);
      rank.textContent = at === null ? "not placed" : `${at}${tied ? " tied" : ""}`;
      rank.classList.toggle("placed", at !== null);
      scores.show();
      flags.show();
    });
    for (const each of root.querySelectorAll(".chip")) each.classList.toggle("chosen", Number(each.dataset.response) === chosen);
  }

  show();
  return {
    focus: () => cards[chosen].element.focus({ preventScroll: true }),
    restore(next) {
      state = next;
      show();
    },
    key(event) {
      if (/^[1-9]$/.test(event.key) && Number(event.key) <= cards.length) placeAndGoOn(Number(event.key));
      else if (event.key === "ArrowRight") choose(chosen + 1);
      else if (event.key === "ArrowLeft") choose(chosen - 1);
      else if (event.key === "ArrowUp") setRanks(move(state.ranks, chosen, -1), chosen);
      else if (event.key === "ArrowDown") setRanks(move(state.ranks, chosen, 1), chosen);
      else if (event.key.toLowerCase() === "t") setRanks(tieWithAbove(state.ranks, chosen), chosen);
      else if (event.key === "Backspace") setRanks(unplace(state.ranks, chosen), chosen);
      else return false;
      return true;
    },
  };
}

// For an adjudicating lead: how the labelers ordered the same responses.
function othersList(others) {
  if (!others?.length) return null;
  const line = (ranks) => tiers(ranks).map((group) => group.map(letter).join(" = ")).join(" > ");
  return h("section", { class: "others" }, h("h2", {}, "What labelers said"),
    h("ul", {}, others.map((other) => h("li", {}, h("code", {}, line(other.answer.ranks)), ` ${other.labeler}`))));
}
