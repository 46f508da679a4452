"""How often a reward model orders two responses as the labelers did: over all pairs, by distance of rank, by category."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from align import statistics
from align.eval.report.comparisons import group_by_category
from align.reward.metrics import ScoredRanking, pairs_and_differences


@dataclass(frozen=True)
class PairAccuracy:
    """Share of pairs in the labelers' order, with its 95 % interval over rankings."""

    label: str
    accuracy: float
    low: float
    high: float
    pairs: int


def pair_accuracy(rankings: Sequence[ScoredRanking], label: str = "all") -> PairAccuracy | None:
    """Accuracy over all pairs (equal rewards count half); None without a pair."""
    pairs, differences = pairs_and_differences(rankings)
    return _accuracy(label, differences, pairs.ranking)


def accuracy_by_distance(rankings: Sequence[ScoredRanking]) -> list[PairAccuracy]:
    """Accuracy by how many ranks apart the labelers put the two responses."""
    pairs, differences = pairs_and_differences(rankings)
    accuracies = []
    for distance in sorted(set(pairs.distance.tolist())):
        chosen = pairs.distance == distance
        accuracy = _accuracy(str(distance), differences[chosen], pairs.ranking[chosen])
        accuracies += [accuracy] if accuracy else []
    return accuracies


def accuracy_by_category(rankings: Sequence[ScoredRanking]) -> list[PairAccuracy]:
    """Accuracy in each category, highest first; empty if the rankings name none."""
    groups = group_by_category(rankings, lambda item: item.category)
    accuracies = [pair_accuracy(group, label) for label, group in groups.items()]
    return sorted((each for each in accuracies if each), key=lambda each: (-each.accuracy, each.label))


def _accuracy(label: str, differences: Tensor, ranking: Tensor) -> PairAccuracy | None:
    if not len(differences):
        return None
    right = (differences > 0).double() + 0.5 * (differences == 0).double()
    low, high = statistics.share_interval(right.numpy(), ranking.numpy())
    return PairAccuracy(label, float(right.mean()), low, high, len(right))
