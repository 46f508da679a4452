"""The rollouts of a PPO run as a page shows them: responses with their figures, each token with its KL and advantage."""

from collections.abc import Sequence
from dataclasses import dataclass

from align.eval.report.data import format_number, visible_text, visible_turns
from align.ppo.rollout_files import RolloutRow

MAX_TOKENS = 9_000
"""Response tokens on a page, over all updates: about a megabyte of it."""
LEVELS = 4
"""Shades of a color for positive values, and for negative ones."""


@dataclass(frozen=True)
class ShownToken:
    """A token, its two shades from -LEVELS to LEVELS, and its figures in words."""

    text: str
    kl: int
    advantage: int
    figures: str


@dataclass(frozen=True)
class ShownRollout:
    """A response and its figures; all text is fit for a page."""

    update: int
    row: int
    prompt: tuple[tuple[str, str], ...]
    category: str
    ended: bool
    reward: float
    kl: float
    length: int
    parts: list[tuple[str, float]]
    tokens: list[ShownToken]


@dataclass(frozen=True)
class RolloutsView:
    """What a page shows of a run's rollouts.

    Attributes:
        kl_scale, advantage_scale: absolute value from which a token has the darkest shade.
        written: responses in the files of the shown updates.
    """

    rollouts: list[ShownRollout]
    kl_scale: float
    advantage_scale: float
    written: int


def show_rollouts(updates: Sequence[Sequence[RolloutRow]]) -> RolloutsView | None:
    """Choose the responses that fit the page, the most informative of each update first; None if there are none."""
    chosen = [row for rows in updates for row in _most_informative(rows, MAX_TOKENS // len(updates))]
    if not chosen:
        return None
    kl_scale, advantage_scale = _scale([row.kl for row in chosen]), _scale([row.advantages for row in chosen])
    shown = [_show(row, kl_scale, advantage_scale) for row in chosen]
    return RolloutsView(shown, kl_scale, advantage_scale, sum(map(len, updates)))


def _most_informative(rows: Sequence[RolloutRow], budget: int) -> list[RolloutRow]:
    """Rows of at most `budget` tokens, but at least one: extremes of reward, KL and length, then in sampling order."""
    by_reward, by_kl = sorted(rows, key=lambda row: row.reward), sorted(rows, key=lambda row: sum(row.kl))
    by_length = sorted(rows, key=lambda row: len(row.ids))
    extremes = [by_reward[-1], by_reward[0], by_kl[-1], by_kl[0], by_length[-1], by_length[0]]
    chosen: dict[int, RolloutRow] = {}
    for row in (*extremes, *rows):
        if row.row not in chosen and (not chosen or len(row.ids) <= budget):
            chosen[row.row] = row
            budget -= len(row.ids)
    return [chosen[number] for number in sorted(chosen)]


def _scale(values: Sequence[Sequence[float]]) -> float:
    """The 95th percentile of the absolute values; 1 if all are 0."""
    sizes = sorted(abs(value) for row in values for value in row)
    return (sizes[int(0.95 * (len(sizes) - 1))] or sizes[-1] or 1.0) if sizes else 1.0


def _show(row: RolloutRow, kl_scale: float, advantage_scale: float) -> ShownRollout:
    def shade(value: float, scale: float) -> int:
        return max(-LEVELS, min(LEVELS, round(LEVELS * value / scale)))

    tokens = []
    for text, log_prob, kl, value, advantage in zip(
        row.tokens, row.log_probs, row.kl, row.values, row.advantages, strict=True
    ):
        numbers = {"log-prob": log_prob, "KL": kl, "advantage": advantage, "value": value}
        figures = ", ".join(f"{name} {format_number(number)}" for name, number in numbers.items())
        tokens.append(ShownToken(visible_text(text), shade(kl, kl_scale), shade(advantage, advantage_scale), figures))
    return ShownRollout(
        update=row.update,
        row=row.row,
        prompt=visible_turns(row.prompt),
        category=visible_text(row.category or ""),
        ended=row.ended,
        reward=row.reward,
        kl=sum(row.kl),
        length=len(row.ids),
        parts=[(visible_text(name), value) for name, value in row.parts.items()],
        tokens=tokens,
    )
