"""Responses to one prompt are read together, so that the prompt is read once."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from align.models.backbone import Backbone
from align.tensor_ops import Padded

Ids = Sequence[int]


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


def families(backbone: Backbone, prompts: Sequence[Ids], rows: Iterable[int]) -> list[list[int]]:
    """What a micro-batch takes whole: the responses to one prompt where `backbone` can share it, else single rows."""
    return by_prompt(prompts, rows) if backbone.shares_prompts else [[row] for row in rows]


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
