"""Micro-batches: a global batch cut by tokens, divided among processes in lockstep, with shared prompts read once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from align.core.tensor_ops import Padded, cut_by_tokens
from align.models.backbone import Backbone
from align.runtime.distributed import gather_rows
from align.runtime.sequence import sequence_size

Item = TypeVar("Item")

MAX_PADDING_PER_BATCH = {"cpu": 64, "cuda": 4096}
"""Tokens whose computation takes about as long as the overhead of one more batch: with more padding than that, splitting the
batch is faster."""


class GroupedRows(list[int]):
    """The rows of a micro-batch, some of which stay together; `starts` has the first row of each group."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(row for group in groups for row in group)
        self.starts = frozenset(group[0] for group in groups)


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward and backward pass.

    Attributes:
        rows: of the global batch; `GroupedRows` where some of them stay together.
        loss_weight: factor of its loss and metrics. 0 for a filler, which keeps processes in lockstep; 1 / n where n
            processes share rows.
    """

    rows: list[int] | GroupedRows
    loss_weight: float

    @property
    def group_count(self) -> int:
        """Groups of rows that stay together; without `GroupedRows`, each row is one."""
        return len(self.rows.starts) if isinstance(self.rows, GroupedRows) else len(self.rows)


def micro_batches(rows: Sequence[int], lengths: Sequence[int], budget: int, accelerator: Accelerator) -> list[MicroBatch]:
    """Return this process's part of a global batch, cut by tokens after sorting by length.

    Every process gets the same number of micro-batches, because all of them must gather sharded weights together; a process
    with fewer rows gets fillers. Processes that share rows get the same ones.

    Args:
        rows: the global batch, the same on every process.
        lengths: tokens of each of `rows`.
        budget: padded tokens that a micro-batch may hold.
    """
    order = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
    sharing = sequence_size(accelerator)
    groups = accelerator.num_processes // sharing
    plans = []
    for number in range(groups):
        own = order[number::groups]
        padding = MAX_PADDING_PER_BATCH.get(accelerator.device.type)
        cut = cut_by_tokens([lengths[i] for i in own], budget * sharing, padding=padding)
        plans.append([[own[i] for i in batch] for batch in cut])
    batch_count = max(len(plan) for plan in plans)
    own_plan = plans[accelerator.process_index // sharing]
    plan = [MicroBatch([rows[i] for i in batch], 1.0 / sharing) for batch in own_plan]
    filler = MicroBatch([rows[order[-1]]], 0.0)  # the shortest row
    return plan + [filler] * (batch_count - len(plan))


def group_batches(
    groups: Sequence[Sequence[int]], costs: Sequence[int], budget: int, accelerator: Accelerator
) -> list[MicroBatch]:
    """Return `micro_batches` of groups of rows that must stay together, as `GroupedRows`; `costs` are tokens by group."""
    plan = micro_batches(range(len(groups)), costs, budget, accelerator)
    return [MicroBatch(GroupedRows([groups[group] for group in batch.rows]), batch.loss_weight) for batch in plan]


def map_rows(
    costs: Sequence[int], budget: int, accelerator: Accelerator, function: Callable[[list[int]], Sequence[Item]]
) -> list[Item]:
    """Return the results of all rows, in their order, on every process; each process works on its own micro-batches.

    Args:
        costs: tokens of each row.
        function: returns a result for each row of a micro-batch: a plain Python object or a tensor on the CPU.
    """
    return map_groups([[row] for row in range(len(costs))], costs, budget, accelerator, function)


def map_groups(
    groups: Sequence[Sequence[int]],
    costs: Sequence[int],
    budget: int,
    accelerator: Accelerator,
    function: Callable[[list[int]], Sequence[Item]],
) -> list[Item]:
    """Apply `map_rows` to groups of rows that are worked on together; see `group_batches`."""
    numbered: list[tuple[int, Item]] = []
    reports = accelerator.process_index % sequence_size(accelerator) == 0  # one of those that share rows, for all of them
    for batch in group_batches(groups, costs, budget, accelerator):
        results = function(batch.rows)
        if batch.loss_weight and reports:
            numbered += zip(batch.rows, results, strict=True)
    return [result for _, result in sorted(gather_rows(numbered, accelerator), key=lambda pair: pair[0])]


Ids = Sequence[int]

MAX_RESPONSES_PER_ROW = 8
"""More would save little of the prompt's cost, while attention grows with the square of the row's length."""


def prompt_groups(
    backbone: Backbone, prompts: Sequence[Ids], responses: Sequence[Ids], rows: Iterable[int], budget: int
) -> list[list[int]]:
    """Return the rows that must stay in one micro-batch: responses to one prompt if `backbone` can share it.

    Args:
        budget: tokens that a group of several rows may hold.
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
    """Return the tokens that each group holds in memory."""
    return [backbone.tokens_in_memory(len(prompts[rows[0]]), [len(responses[row]) for row in rows]) for rows in groups]


def pack_groups(
    prompts: Sequence[Ids], responses: Sequence[Ids], rows: Sequence[int] | GroupedRows, device: torch.device
) -> tuple[Padded, Padded, Tensor | None]:
    """Return some rows as `Backbone.hidden` takes them: distinct prompts, responses, `prompt_of_response`.

    Args:
        rows: of a micro-batch. The groups of `GroupedRows` stay apart: two groups of one prompt are two prompts here. Of
            other rows, neighbors with equal prompts share theirs.

    Returns:
        Prompts, responses, and the prompt of each response [B]; None if every row has its own prompt.
    """
    distinct: list[Ids] = []
    prompt_of_response: list[int] = []
    starts = rows.starts if isinstance(rows, GroupedRows) else frozenset()
    for row in rows:
        if not distinct or row in starts or list(distinct[-1]) != list(prompts[row]):
            distinct.append(prompts[row])
        prompt_of_response.append(len(distinct) - 1)
    prompt = Padded.from_lists([list(ids) for ids in distinct]).to(device)
    response = Padded.from_lists([list(responses[row]) for row in rows]).to(device)
    return prompt, response, torch.tensor(prompt_of_response, device=device) if len(distinct) < len(rows) else None
