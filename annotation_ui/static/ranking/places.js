// Rankings as pure functions. `ranks[i]` is the place of the i-th response shown: 1 (best) to K, equal for a tie, null
// for none yet. A place is a slot: it does not change when other responses are placed, and slots may stay empty.

// The responses in each slot, best first; with `tiers`, in each slot that is taken.
export const slots = (ranks) => ranks.map((_, at) => ranks.flatMap((rank, index) => (rank === at + 1 ? [index] : [])));
export const tiers = (ranks) => slots(ranks).filter((slot) => slot.length);

// Put a response in a place; with others there, it is tied with them. null takes it off the board.
export const place = (ranks, index, rank) => ranks.map((old, other) => (other === index ? rank : old));

// Put a response alone between slot `gap` and the next. The others make room: those below if a slot is free there.
export function insert(ranks, index, gap) {
  const others = place(ranks, index, null);
  const free = slots(others).map((slot) => !slot.length); // at least one is free: the response itself is in none
  const below = free.indexOf(true, gap) + 1;
  if (below) return place(others.map((rank) => (rank > gap && rank < below ? rank + 1 : rank)), index, gap + 1);
  const above = free.lastIndexOf(true, gap - 1) + 1;
  return place(others.map((rank) => (rank > above && rank <= gap ? rank - 1 : rank)), index, gap);
}

// Move one step up (-1) or down (+1): out of a tie, else to the next slot, whose responses come back in exchange.
export function move(ranks, index, step) {
  const from = ranks[index];
  const all = slots(ranks);
  if (from === null) return place(ranks, index, (step < 0 ? all.findIndex((slot) => !slot.length) : all.findLastIndex((slot) => !slot.length)) + 1);
  if (all[from - 1].length > 1) return insert(ranks, index, step < 0 ? from - 1 : from);
  const to = from + step;
  if (to < 1 || to > ranks.length) return ranks;
  return ranks.map((rank) => (rank === from ? to : rank === to ? from : rank));
}

// Tie a response with the nearest ones above it.
export function tieWithAbove(ranks, index) {
  const above = ranks.filter((rank) => rank !== null && rank < ranks[index]);
  return above.length ? place(ranks, index, Math.max(...above)) : ranks;
}

// The same order as 1, 2, 3 ... without empty slots.
export function dense(ranks) {
  const taken = [...new Set(ranks)].sort((a, b) => a - b);
  return ranks.map((rank) => taken.indexOf(rank) + 1);
}
