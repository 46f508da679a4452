"""What a report compares: responses before and after training, and a reward model's order with that of the labelers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from align.core import statistics
from align.eval.report.data import RunData, Sample, StageRun
from align.reward.rankings import ScoredRanking, pairs_and_differences


@dataclass(frozen=True)
class SamplePair:
    """Responses to the same prompt before and after training; `before` is None where there is no earlier one."""

    before: Sample | None
    after: Sample

    @property
    def change(self) -> float:
        """Reward after minus reward before; 0 without a response before."""
        return self.after.reward - self.before.reward if self.before else 0.0

    @property
    def worse(self) -> bool:
        """Whether the reward fell."""
        return self.change < 0


def first_and_kept_updates(run: RunData) -> tuple[int | None, int | None]:
    """Return the updates of the first evaluation and of the one whose policy was kept; None where there is none.

    Where no evaluation qualified, the trainer keeps the last policy.
    """
    ppo = run.stages.get("ppo")
    if ppo is None:
        return None, None
    updates = sorted(set(ppo.series("validation/reward").updates) | set(run.samples))
    if not updates:
        return None, None
    kept = max(ppo.series("validation/kept").updates, default=updates[-1])
    return updates[0], kept if kept > updates[0] else None


def max_kl(ppo: StageRun) -> float:
    """Return the KL (nats per response) up to which a policy may be kept; infinite if the settings are lost."""
    limit = ppo.config.get("max_kl")
    return float(limit) if isinstance(limit, int | float) else float("inf")


def pair_samples(before: Sequence[Sample], after: Sequence[Sample]) -> list[SamplePair]:
    """Pair each later response with the earlier one to its prompt; a prompt that comes twice is matched in order."""
    earlier = dict(zip(_prompt_keys(before), before, strict=True))
    return [SamplePair(earlier.get(key), sample) for key, sample in zip(_prompt_keys(after), after, strict=True)]


def _prompt_keys(samples: Sequence[Sample]) -> list[tuple[object, int]]:
    """Return for each sample its prompt, and how often the prompt came before."""
    seen: Counter[object] = Counter()
    keys: list[tuple[object, int]] = []
    for sample in samples:
        keys.append((sample.prompt, seen[sample.prompt]))
        seen[sample.prompt] += 1
    return keys


def alternate_gains_and_losses(pairs: Sequence[SamplePair]) -> list[SamplePair]:
    """Return the largest gain, the largest loss, the next gain, the next loss ...; unchanged rewards come last."""
    gains = sorted((pair for pair in pairs if pair.change > 0), key=lambda pair: -pair.change)
    losses = sorted((pair for pair in pairs if pair.change < 0), key=lambda pair: pair.change)
    alternating = [pair for gain_and_loss in zip_longest(gains, losses) for pair in gain_and_loss if pair]
    return alternating + [pair for pair in pairs if pair.change == 0]


def mean_with_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return mean and 95 % bootstrap interval of independent values; None where they are all equal."""
    if len(set(values)) < 2:
        return None
    return sum(values) / len(values), *statistics.mean_interval(values)


@dataclass(frozen=True)
class PairAccuracy:
    """Share of pairs in the labelers' order, with its 95 % interval over rankings."""

    label: str
    accuracy: float
    low: float
    high: float
    pairs: int


def pair_accuracy(rankings: Sequence[ScoredRanking], label: str = "all") -> PairAccuracy | None:
    """Return the accuracy over all pairs (equal rewards count half); None without a pair."""
    pairs, differences = pairs_and_differences(rankings)
    return _accuracy(label, differences, pairs.ranking) if len(differences) else None


def accuracy_by_distance(rankings: Sequence[ScoredRanking]) -> list[PairAccuracy]:
    """Return the accuracy by how many ranks apart the labelers put the two responses."""
    pairs, differences = pairs_and_differences(rankings)
    return [
        _accuracy(str(distance), differences[pairs.distance == distance], pairs.ranking[pairs.distance == distance])
        for distance in sorted(set(pairs.distance.tolist()))
    ]


def accuracy_by_category(rankings: Sequence[ScoredRanking]) -> list[PairAccuracy]:
    """Return the accuracy in each category, highest first; empty if the rankings name none."""
    groups: dict[str, list[ScoredRanking]] = {}
    for ranking in rankings:
        if ranking.category:
            groups.setdefault(ranking.category, []).append(ranking)
    accuracies = [pair_accuracy(group, label) for label, group in groups.items()]
    return sorted((each for each in accuracies if each), key=lambda each: (-each.accuracy, each.label))


def _accuracy(label: str, differences: Tensor, ranking: Tensor) -> PairAccuracy:
    right = (differences > 0).double() + 0.5 * (differences == 0).double()
    low, high = statistics.share_interval(right.numpy(), ranking.numpy())
    return PairAccuracy(label, float(right.mean()), low, high, len(right))
