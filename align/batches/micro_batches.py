"""Micro-batches: a global batch split by tokens and distributed in lockstep, with shared prompts encoded once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from align.core.tensor_ops import Padded, cut_by_tokens
from align.models.backbone import Backbone
from align.runtime.distributed import gather_rows

Item = TypeVar("Item")

MAX_PADDING_PER_BATCH = {"cpu": 64, "cuda": 4096}
"""Padding tokens whose computation costs about as much as the overhead of another batch. With more padding, splitting the
batch is faster.
"""


@dataclass(frozen=True)
class MicroBatch:
    """Row numbers for one forward and backward pass.

    Attributes:
        groups: row numbers in the global batch. The rows of a group share one prompt in memory.
        weight: factor of the loss and the metrics: 1, or 0 for a filler that keeps processes in lockstep.
    """

    groups: list[list[int]]
    weight: float = 1.0

    @property
    def rows(self) -> list[int]:
        """Row numbers of all groups."""
        return [row for group in self.groups for row in group]


def micro_batches(rows: Sequence[int], lengths: Sequence[int], budget: int, accelerator: Accelerator) -> list[MicroBatch]:
    """Return this process's part of a global batch, sorted by length and split by tokens.

    Every process gets the same number of micro-batches, because all must gather sharded weights together. A process with
    fewer rows gets fillers.

    Args:
        rows: the global batch, the same on every process.
        lengths: number of tokens of each row.
        budget: maximum padded tokens per micro-batch.
    """
    return group_batches([[row] for row in rows], lengths, budget, accelerator)


def group_batches(
    groups: Sequence[Sequence[int]], costs: Sequence[int], budget: int, accelerator: Accelerator
) -> list[MicroBatch]:
    """Return `micro_batches` of groups of rows that must stay together. `costs` are the tokens of each group."""
    order = sorted(range(len(groups)), key=lambda i: (-costs[i], i))
    padding = MAX_PADDING_PER_BATCH.get(accelerator.device.type)
    plans = []
    for process in range(accelerator.num_processes):
        share = order[process :: accelerator.num_processes]
        cut = cut_by_tokens([costs[i] for i in share], budget, padding=padding)
        plans.append([MicroBatch([list(groups[share[i]]) for i in batch]) for batch in cut])
    plan = plans[accelerator.process_index]
    filler = MicroBatch([list(groups[order[-1]])], weight=0.0)  # the smallest group
    return plan + [filler] * (max(map(len, plans)) - len(plan))


@dataclass(frozen=True)
class PackedInputs:
    """Token ids of B responses to P prompts, in the input format of `Backbone.hidden`."""

    prompt: Padded
    """[P, L]."""
    response: Padded
    """[B, T]."""
    prompt_of_response: Tensor | None
    """[B] prompt index of each response. If None, response i answers prompt i."""


def map_rows(
    costs: Sequence[int], budget: int, accelerator: Accelerator, function: Callable[[list[int]], Sequence[Item]]
) -> list[Item]:
    """Compute the results of all rows in order, on every process. The work is distributed over processes in micro-batches.

    Args:
        costs: number of tokens of each row.
        function: function that returns a result per row of a micro-batch: a plain Python object or a tensor on the CPU.
    """
    return map_groups([[row] for row in range(len(costs))], costs, budget, accelerator, lambda batch: function(batch.rows))


def map_groups(
    groups: Sequence[Sequence[int]],
    costs: Sequence[int],
    budget: int,
    accelerator: Accelerator,
    function: Callable[[MicroBatch], Sequence[Item]],
) -> list[Item]:
    """Apply `map_rows` to groups of rows; see `group_batches`."""
    numbered: list[tuple[int, Item]] = []
    for batch in group_batches(groups, costs, budget, accelerator):
        results = function(batch)
        if batch.weight:
            numbered += zip(batch.rows, results, strict=True)
    return [result for _, result in sorted(gather_rows(numbered, accelerator), key=lambda pair: pair[0])]


Ids = Sequence[int]

MAX_RESPONSES_PER_ROW = 8
"""Beyond this, little of the prompt's cost is saved, while attention cost grows with the square of the row length."""


def prompt_groups(
    backbone: Backbone, prompts: Sequence[Ids], responses: Sequence[Ids], rows: Iterable[int], budget: int
) -> list[list[int]]:
    """Return the rows that must share a micro-batch: responses to the same prompt, if `backbone` can share it.

    Args:
        budget: maximum tokens of a group of several rows.
    """
    if not backbone.shares_prompts:
        return [[row] for row in rows]
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        by_prompt.setdefault(tuple(prompts[row]), []).append(row)
    groups: list[list[int]] = []
    for same_prompt in by_prompt.values():
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
    """Return the number of tokens in memory per group."""
    return [backbone.tokens_in_memory(len(prompts[rows[0]]), [len(responses[row]) for row in rows]) for rows in groups]


def pack_groups(
    prompts: Sequence[Ids], responses: Sequence[Ids], groups: Sequence[Sequence[int]], device: torch.device
) -> PackedInputs:
    """Pack groups of rows for `Backbone.hidden`. All rows of a group have the prompt of its first row."""
    prompt_of_response = [number for number, group in enumerate(groups) for _ in group]
    return PackedInputs(
        prompt=Padded.from_lists([list(prompts[group[0]]) for group in groups]).to(device),
        response=Padded.from_lists([list(responses[row]) for group in groups for row in group]).to(device),
        prompt_of_response=None
        if len(groups) == len(prompt_of_response)
        else torch.tensor(prompt_of_response, device=device),
    )
