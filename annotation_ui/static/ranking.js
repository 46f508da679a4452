// Rankings as pure functions: `ranks[i]` is the rank of the i-th response shown (1 best, equal = tie, null = not placed).

export function tiers(ranks) {
  const groups = [];
  ranks.forEach((rank, index) => {
    if (rank !== null) (groups[rank - 1] ??= []).push(index);
  });
  return groups.filter(Boolean);
}

function fromTiers(groups, size) {
  const ranks = Array(size).fill(null);
  groups.filter((group) => group.length).forEach((group, rank) => group.forEach((index) => (ranks[index] = rank + 1)));
  return ranks;
}

const tierOf = (groups, index) => groups.findIndex((group) => group.includes(index));

// Put a response on a place of its own; what was there moves down.
export function place(ranks, index, rank) {
  const rest = tiers(ranks.map((old, other) => (other === index ? null : old)));
  const groups = tiers(fromTiers(rest, ranks.length));
  groups.splice(Math.min(rank - 1, groups.length), 0, [index]);
  return fromTiers(groups, ranks.length);
}

// Drop a response between two tiers, counted before it is taken out of its own.
export function placeInGap(ranks, index, gap) {
  const groups = tiers(ranks);
  groups.splice(gap, 0, [index]);
  return fromTiers(groups.map((group, at) => (at === gap ? group : group.filter((other) => other !== index))), ranks.length);
}

// Tie a response with those of a tier.
export function placeInTier(ranks, index, tier) {
  const groups = tiers(ranks).map((group) => group.filter((other) => other !== index));
  groups[tier].push(index);
  return fromTiers(groups, ranks.length);
}

// Tie with the one above.
export function tieWithAbove(ranks, index) {
  const at = tierOf(tiers(ranks), index);
  return at > 0 ? placeInTier(ranks, index, at - 1) : ranks;
}

// One step up (-1) or down (+1): out of a tie first, then past the neighbour.
export function move(ranks, index, step) {
  const groups = tiers(ranks);
  const at = tierOf(groups, index);
  if (at < 0) return place(ranks, index, step < 0 ? 1 : ranks.length);
  if (groups[at].length > 1) return placeInGap(ranks, index, step < 0 ? at : at + 1);
  const gap = step < 0 ? at - 1 : at + 2;
  return gap < 0 || gap > groups.length ? ranks : placeInGap(ranks, index, gap);
}

export function unplace(ranks, index) {
  return fromTiers(tiers(ranks.map((rank, other) => (other === index ? null : rank))), ranks.length);
}
