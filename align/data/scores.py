"""From scores to ranks, and which responses to keep where there are more than a ranking takes."""

from collections.abc import Sequence

from align.data.fields import field_error, shown
from align.data.records import MAX_RESPONSES


def ranks_of(scores: Sequence[float]) -> tuple[int, ...]:
    """Dense ranks [K] of scores [K]: the highest score has rank 1, equal scores share a rank."""
    levels = sorted(set(scores), reverse=True)
    return tuple(levels.index(score) + 1 for score in scores)


def spread(count: int, keep: int = MAX_RESPONSES) -> list[int]:
    """Indices of at most `keep` of `count` ordered things, the first and the last among them, evenly apart."""
    if count <= keep:
        return list(range(count))
    return [round(i * (count - 1) / (keep - 1)) for i in range(keep)]


def check_score(value: object, field: str) -> float:
    """A score to order by: a number, and not NaN, which has no place in an order."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise field_error(field, f"is {shown(value)}", "give a number")
    return float(value)
