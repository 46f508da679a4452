"""What a report compares: the evaluation before training with that of the policy that was kept, and groups of pairs."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

import torch
from torch import Tensor

from align.eval import intervals
from align.eval.report.runs import Runs, Sample, StageRun
from align.reward.loss import pairs_of
from align.reward.metrics import Scored

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Pair:
    """Responses to the same prompt before and after training; `before` is None where there is no earlier one."""

    before: Sample | None
    after: Sample

    @property
    def change(self) -> float:
        """Reward after less reward before; 0 without a before."""
        return self.after.reward - self.before.reward if self.before else 0.0

    @property
    def worse(self) -> bool:
        """Whether the reward fell."""
        return self.change < 0


@dataclass(frozen=True)
class Share:
    """A share of pairs with its 95 % bootstrap interval over rankings."""

    label: str
    share: float
    low: float
    high: float
    pairs: int


def first_and_kept(runs: Runs) -> tuple[int | None, int | None]:
    """The updates of the first evaluation and of the one whose policy was kept; None where there is none.

    The kept one is chosen as the trainer does: highest held-out reward after update 0 with a KL of at most `max_kl`. Where
    no evaluation qualifies, the trainer keeps the last policy, and so does this.
    """
    ppo = runs.stages.get("ppo")
    if ppo is None:
        return None, None
    rewards = ppo.series("validation/reward")
    updates = sorted(set(rewards.updates) | set(runs.samples))
    if not updates:
        return None, None
    first = updates[0]
    later = [
        update for update in rewards.updates if update > 0 and (ppo.series("validation/kl").at(update) or 0.0) <= max_kl(ppo)
    ]
    chosen = max(later, key=lambda update: (rewards.at(update) or 0.0, -update), default=updates[-1])
    return first, chosen if chosen > first else None


def max_kl(ppo: StageRun) -> float:
    """The KL (nats a response) up to which a policy may be kept; endless if the settings are lost."""
    limit = ppo.config.get("max_kl")
    return float(limit) if isinstance(limit, int | float) else float("inf")


def pair_samples(before: Sequence[Sample], after: Sequence[Sample]) -> list[Pair]:
    """Each later response with the earlier one to the same prompt; a prompt that comes twice is matched in order."""
    earlier = dict(zip(_keys(before), before, strict=True))
    return [Pair(earlier.get(key), sample) for key, sample in zip(_keys(after), after, strict=True)]


def in_turn(pairs: Sequence[Pair]) -> list[Pair]:
    """The largest gain, the largest loss, the next gain, the next loss ...; what did not change comes last."""
    gains = sorted((pair for pair in pairs if pair.change > 0), key=lambda pair: -pair.change)
    losses = sorted((pair for pair in pairs if pair.change < 0), key=lambda pair: pair.change)
    mixed = [pair for both in zip_longest(gains, losses) for pair in both if pair]
    return mixed + [pair for pair in pairs if pair.change == 0]


def _keys(samples: Sequence[Sample]) -> list[tuple[object, int]]:
    seen: Counter[object] = Counter()
    keys: list[tuple[object, int]] = []
    for sample in samples:
        keys.append((sample.prompt, seen[sample.prompt]))
        seen[sample.prompt] += 1
    return keys


def mean_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Mean and 95 % bootstrap interval of independent values; None for fewer than two."""
    if len(values) < 2:
        return None
    return sum(values) / len(values), *intervals.mean_interval(values)


def pair_differences(rankings: Sequence[Scored]) -> Tensor:
    """Reward of the better response less that of the worse one [P], for all pairs that labelers told apart."""
    rewards = torch.tensor([value for item in rankings for value in item.rewards], dtype=torch.float64)
    pairs = pairs_of([list(item.ranks) for item in rankings], [0.0] * len(rankings))
    return rewards[pairs.better] - rewards[pairs.worse]


def accuracy(rankings: Sequence[Scored], label: str = "all") -> Share | None:
    """Share of pairs in the labelers' order (equal rewards count half); None without a pair."""
    pairs = pairs_of([list(item.ranks) for item in rankings], [0.0] * len(rankings))
    return _share(label, pair_differences(rankings), pairs.ranking)


def accuracy_by_distance(rankings: Sequence[Scored]) -> list[Share]:
    """Pair accuracy by how many ranks apart the labelers put the two responses."""
    pairs = pairs_of([list(item.ranks) for item in rankings], [0.0] * len(rankings))
    difference, found = pair_differences(rankings), []
    for distance in sorted(set(pairs.distance.tolist())):
        inside = pairs.distance == distance
        share = _share(str(distance), difference[inside], pairs.ranking[inside])
        found += [share] if share else []
    return found


def accuracy_by_category(rankings: Sequence[Scored]) -> list[Share]:
    """Pair accuracy of each category, highest first; empty if the rankings name none."""
    groups = grouped(rankings, lambda item: item.category)
    shares = [accuracy(group, label) for label, group in groups.items()]
    return sorted((share for share in shares if share), key=lambda share: (-share.share, share.label))


def _share(label: str, difference: Tensor, ranking: Tensor) -> Share | None:
    if not len(difference):
        return None
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    _, group = torch.unique(ranking, return_inverse=True)
    low, high = intervals.mean_interval(right.numpy(), groups=group.tolist())
    return Share(label, float(right.mean()), low, high, len(right))


def grouped(items: "Sequence[Key]", category: "Callable[[Key], str | None]") -> Mapping[str, list[Key]]:
    """Items by category, in alphabetical order; those without one are left out."""
    found: dict[str, list[Key]] = {}
    for item in items:
        label = category(item)
        if label:
            found.setdefault(label, []).append(item)
    return dict(sorted(found.items()))
