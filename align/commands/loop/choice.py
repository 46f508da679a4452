"""Which prompts are labeled next: some because the reward models disagree about them, the others at random."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy

from align.commands.loop.labelers import AnswerScorer
from align.commands.loop.rows import Row
from align.core.errors import UserError
from align.data.conversation import to_json
from align.data.readers import read_records
from align.data.records import Prompt


def choose_prompts(source: str, used: set[str], count: int, random: numpy.random.Generator) -> list[Row]:
    """Draw `count` prompts that no earlier round used, in random order; all that are left, if they are fewer.

    Args:
        source: prompts: file, folder or hub name; one without an id gets its number.
        used: ids of the prompts of earlier rounds.

    Raises:
        UserError: if two prompts have the same id, or no prompt is left.
    """
    rows = []
    for number, prompt in enumerate(read_records(source, Prompt), start=1):
        row: Row = {"id": prompt.id or str(number), "prompt": to_json(prompt.prompt)}
        rows.append(row | ({"category": prompt.category} if prompt.category else {}))
    for first, second in pairwise(sorted(row["id"] for row in rows)):
        if first == second:
            raise UserError(f"{source}: two prompts have the id '{first}'; give each its own")
    left = [row for row in rows if row["id"] not in used]
    if not left:
        raise UserError(f"{source}: all {len(rows)} prompts have been labeled; add prompts, or lower rounds")
    return [left[index] for index in random.permutation(len(left))[:count]]


def most_disputed(
    rows: Sequence[Row], scorers: Sequence[AnswerScorer], count: int, share: float, random: numpy.random.Generator
) -> list[Row]:
    """Choose `count` rows: a share by highest disagreement, which is added to these rows, the others at random.

    Args:
        rows: prompts with several answers, in random order.
        scorers: the reward models.
        share: share of the rows chosen by disagreement.

    Returns:
        The chosen rows in random order, so that labelers cannot tell why a row was chosen.
    """
    disagreements = [ranking_disagreement(row, scorers) for row in rows]
    ranked = sorted(range(len(rows)), key=lambda index: -disagreements[index])
    disputed = ranked[: round(count * share)]
    others = [index for index in range(len(rows)) if index not in set(disputed)][: max(0, count - len(disputed))]
    chosen = [{**rows[index], "disagreement": round(disagreements[index], 6)} for index in disputed]
    chosen += [rows[index] for index in others]
    return [chosen[index] for index in random.permutation(len(chosen))]


def ranking_disagreement(row: Row, scorers: Sequence[AnswerScorer]) -> float:
    """Variance over reward models of the probability that one answer beats another, averaged over pairs of answers.

    Christiano et al. 2017 choose the pairs with the highest such variance (section 2.2.4).
    """
    prompts = [row["prompt"]] * len(row["responses"])
    rewards = numpy.array([scorer(prompts, row["responses"]) for scorer in scorers])
    pairs = list(combinations(range(rewards.shape[1]), 2))
    preferred = numpy.array([1 / (1 + numpy.exp(rewards[:, j] - rewards[:, i])) for i, j in pairs])
    return float(preferred.var(axis=1).mean())
