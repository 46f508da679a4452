"use strict";
const form = document.getElementById("filters");
if (form) {
  const [search, order, worse, count, list] = ["search", "order", "worse", "count", "pairs"].map((id) => document.getElementById(id));
  const pairs = [...list.children].map((element, place) => ({
    element, place, change: Number(element.dataset.change), text: element.textContent.toLowerCase(),
  }));
  const compare = {
    listed: (a, b) => a.place - b.place,
    gains: (a, b) => b.change - a.change,
    losses: (a, b) => a.change - b.change,
  };
  const applyFilters = () => {
    const wanted = search.value.trim().toLowerCase();
    let shown = 0;
    for (const pair of pairs) {
      const matches = pair.text.includes(wanted) && !(worse.checked && pair.change >= 0);
      pair.element.hidden = !matches;
      shown += matches;
    }
    count.textContent = `${shown} of ${pairs.length} prompts`;
  };
  order.addEventListener("change", () => list.append(...[...pairs].sort(compare[order.value]).map((pair) => pair.element)));
  search.addEventListener("input", applyFilters);
  worse.addEventListener("change", applyFilters);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  applyFilters();
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
