"""Packing of responses to one prompt into one row, so that the prompt is read once."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from align.batches.micro_batches import GroupedRows
from align.core.tensor_ops import Padded
from align.models.backbone import Backbone

Ids = Sequence[int]

MAX_RESPONSES_PER_ROW = 8
"""More would save little of the prompt's cost, while attention grows with the square of the row's length."""


def rows_by_prompt(prompts: Sequence[Ids], rows: Iterable[int]) -> list[list[int]]:
    """Rows grouped by equal prompts, in the order in which the prompts first appear.

    Args:
        prompts: token ids of the prompt of every row.
        rows: the rows to group.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        groups.setdefault(tuple(prompts[row]), []).append(row)
    return list(groups.values())


def prompt_groups(
    backbone: Backbone, prompts: Sequence[Ids], responses: Sequence[Ids], rows: Iterable[int], budget: int
) -> list[list[int]]:
    """The rows that must stay in one micro-batch: responses to one prompt if `backbone` can share it, else single rows.

    Args:
        budget: tokens that a group of several rows may hold.
    """
    if not backbone.shares_prompts:
        return [[row] for row in rows]
    groups: list[list[int]] = []
    for same_prompt in rows_by_prompt(prompts, rows):
        groups.append([])
        for row in same_prompt:
            (tokens,) = group_tokens(backbone, prompts, responses, [[*groups[-1], row]])
            if groups[-1] and (len(groups[-1]) == MAX_RESPONSES_PER_ROW or tokens > budget):
                groups.append([])
            groups[-1].append(row)
    return groups


def group_tokens(
    backbone: Backbone, prompts: Sequence[Ids], responses: Sequence[Ids], groups: Sequence[Sequence[int]]
) -> list[int]:
    """Tokens that each group holds in memory."""
    return [backbone.tokens_in_memory(len(prompts[rows[0]]), [len(responses[row]) for row in rows]) for rows in groups]


def pack_groups(
    prompts: Sequence[Ids], responses: Sequence[Ids], rows: Sequence[int], device: torch.device
) -> tuple[Padded, Padded, Tensor | None]:
    """Some rows as `Backbone.hidden` takes them: distinct prompts, responses in the order of `rows`, and `prompt_index`.

    Args:
        rows: of a micro-batch that was cut into groups, which stay apart: two groups of one prompt are two prompts here. Of
            other rows, neighbors with equal prompts share theirs.

    Returns:
        Prompts, responses, and the prompt of each response [R]; None if every row has its own prompt.
    """
    distinct: list[Ids] = []
    prompt_index: list[int] = []
    starts = rows.starts if isinstance(rows, GroupedRows) else frozenset()
    for row in rows:
        if not distinct or row in starts or list(distinct[-1]) != list(prompts[row]):
            distinct.append(prompts[row])
        prompt_index.append(len(distinct) - 1)
    prompt = Padded.from_lists([list(ids) for ids in distinct]).to(device)
    response = Padded.from_lists([list(responses[row]) for row in rows]).to(device)
    return prompt, response, torch.tensor(prompt_index, device=device) if len(distinct) < len(rows) else None
