"""Responses to one prompt are read together, so that the prompt is read once."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from align.models.backbone import Backbone
from align.tensor_ops import Padded

Ids = Sequence[int]

MOST = 8
"""Responses that share a row: the prompt's part in each gets small, while attention grows with the row's square."""


def by_prompt(prompts: Sequence[Ids], rows: Iterable[int]) -> list[list[int]]:
    """Rows with the same prompt side by side, in the order in which the prompts first appear.

    Args:
        prompts: token ids of the prompt of every row.
        rows: the rows to look at.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        found.setdefault(tuple(prompts[row]), []).append(row)
    return list(found.values())


def families(
    backbone: Backbone, prompts: Sequence[Ids], responses: Sequence[Ids], rows: Iterable[int], budget: int
) -> list[list[int]]:
    """What a micro-batch takes whole: responses to one prompt where `backbone` can share it, else single rows.

    Args:
        budget: tokens that a family may hold, if it has more than one row.
    """
    if not backbone.shares_prompts:
        return [[row] for row in rows]
    found: list[list[int]] = []
    for same in by_prompt(prompts, rows):
        found.append([])
        for row in same:
            (tokens,) = family_tokens(backbone, prompts, responses, [[*found[-1], row]])
            if found[-1] and (len(found[-1]) == MOST or tokens > budget):
                found.append([])
            found[-1].append(row)
    return found


def family_tokens(
    backbone: Backbone, prompts: Sequence[Ids], responses: Sequence[Ids], families: Sequence[Sequence[int]]
) -> list[int]:
    """Tokens that each family holds in memory."""
    return [backbone.row_tokens(len(prompts[rows[0]]), [len(responses[row]) for row in rows]) for rows in families]


def lay_together(
    prompts: Sequence[Ids], responses: Sequence[Ids], rows: Sequence[int], device: torch.device
) -> tuple[Padded, Padded, Tensor | None]:
    """Some rows as `Backbone.hidden` takes them: prompts, responses in the order of `rows`, and whose prompt is whose.

    Rows of a family stand side by side in `rows`; the third is None where every row has a prompt of its own.
    """
    different: list[Ids] = []
    owner: list[int] = []
    for row in rows:
        if not different or list(different[-1]) != list(prompts[row]):
            different.append(prompts[row])
        owner.append(len(different) - 1)
    read = Padded.from_lists([list(prompt) for prompt in different]).to(device)
    said = Padded.from_lists([list(responses[row]) for row in rows]).to(device)
    return read, said, torch.tensor(owner, device=device) if len(different) < len(rows) else None
