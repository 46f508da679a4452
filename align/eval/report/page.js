"use strict";
const form = document.getElementById("filters");
if (form) {
  const [find, order, worse, count, list] = ["find", "order", "worse", "count", "pairs"].map((id) => document.getElementById(id));
  const pairs = [...list.children].map((element, place) => ({
    element, place, change: Number(element.dataset.change), text: element.textContent.toLowerCase(),
  }));
  const by = {
    turn: (a, b) => a.place - b.place,
    up: (a, b) => b.change - a.change,
    down: (a, b) => a.change - b.change,
  };
  const show = () => {
    const wanted = find.value.trim().toLowerCase();
    let shown = 0;
    for (const pair of pairs) {
      const keep = pair.text.includes(wanted) && !(worse.checked && pair.change >= 0);
      pair.element.hidden = !keep;
      shown += keep;
    }
    count.textContent = `${shown} of ${pairs.length} prompts`;
  };
  order.addEventListener("change", () => list.append(...[...pairs].sort(by[order.value]).map((pair) => pair.element)));
  find.addEventListener("input", show);
  worse.addEventListener("change", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  show();
}
// On paper nobody can open what is folded.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details.box:not([open])")];
  for (const details of opened) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of opened) details.open = false;
});
