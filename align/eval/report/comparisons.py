"""What a report compares: the evaluation before training with that of the policy that was kept."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

from align import statistics
from align.eval.report.runs import RunData, Sample, StageRun

Item = TypeVar("Item", bound=Hashable)


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
    """The updates of the first evaluation and of the one whose policy was kept; None where there is none.

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
    """The KL (nats per response) up to which a policy may be kept; infinite if the settings are lost."""
    limit = ppo.config.get("max_kl")
    return float(limit) if isinstance(limit, int | float) else float("inf")


def pair_samples(before: Sequence[Sample], after: Sequence[Sample]) -> list[SamplePair]:
    """Each later response with the earlier one to the same prompt; a prompt that comes twice is matched in order."""
    earlier = dict(zip(_prompt_keys(before), before, strict=True))
    return [SamplePair(earlier.get(key), sample) for key, sample in zip(_prompt_keys(after), after, strict=True)]


def _prompt_keys(samples: Sequence[Sample]) -> list[tuple[object, int]]:
    """For each sample its prompt, and how often the prompt came before."""
    seen: Counter[object] = Counter()
    keys: list[tuple[object, int]] = []
    for sample in samples:
        keys.append((sample.prompt, seen[sample.prompt]))
        seen[sample.prompt] += 1
    return keys


def alternate_gains_and_losses(pairs: Sequence[SamplePair]) -> list[SamplePair]:
    """The largest gain, the largest loss, the next gain, the next loss ...; unchanged rewards come last."""
    gains = sorted((pair for pair in pairs if pair.change > 0), key=lambda pair: -pair.change)
    losses = sorted((pair for pair in pairs if pair.change < 0), key=lambda pair: pair.change)
    alternating = [pair for gain_and_loss in zip_longest(gains, losses) for pair in gain_and_loss if pair]
    return alternating + [pair for pair in pairs if pair.change == 0]


def mean_with_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Mean and 95 % bootstrap interval of independent values; None where they are all equal."""
    if len(set(values)) < 2:
        return None
    return sum(values) / len(values), *statistics.mean_interval(values)


def group_by_category(items: "Sequence[Item]", category_of: "Callable[[Item], str | None]") -> Mapping[str, list[Item]]:
    """Items by category, in alphabetical order; those without one are left out."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        category = category_of(item)
        if category:
            groups.setdefault(category, []).append(item)
    return dict(sorted(groups.items()))
