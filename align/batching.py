"""Micro-batches: a global batch cut by tokens, and spread over processes that must keep in step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from accelerate import Accelerator

from align.distributed import gather_rows
from align.tensor_ops import cut_by_tokens

Item = TypeVar("Item")

PADDING_WORTH_A_BATCH = {"cpu": 64, "cuda": 4096}
"""Tokens that a device computes in about the time that a batch of its own costs in calls: more padding than that in a
batch is dearer than cutting it."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward and backward pass. A filler has weight 0: it keeps processes in step and changes nothing."""

    rows: list[int]
    weight: float


def micro_batches(rows: Sequence[int], lengths: Sequence[int], budget: int, accelerator: Accelerator) -> list[MicroBatch]:
    """This process's part of a global batch, cut by tokens after sorting by length.

    Every process gets the same number of micro-batches (sharded weights are gathered by all in step), the last ones
    fillers where its own are fewer.

    Args:
        rows: the global batch, the same on every process.
        lengths: tokens of each of `rows`.
        budget: padded tokens that a micro-batch may hold.
    """
    order = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
    world = accelerator.num_processes
    plans = []
    for rank in range(world):
        mine = order[rank::world]
        padding = PADDING_WORTH_A_BATCH.get(accelerator.device.type)
        cut = cut_by_tokens([lengths[i] for i in mine], budget, padding=padding)
        plans.append([[mine[i] for i in batch] for batch in cut])
    most = max(len(plan) for plan in plans)
    plan = [MicroBatch([rows[i] for i in batch], 1.0) for batch in plans[accelerator.process_index]]
    filler = MicroBatch([rows[order[-1]]], 0.0)  # the shortest row
    return plan + [filler] * (most - len(plan))


def family_batches(
    families: Sequence[Sequence[int]], costs: Sequence[int], budget: int, accelerator: Accelerator
) -> list[MicroBatch]:
    """`micro_batches` of rows of which some must stay together, side by side.

    Args:
        families: rows that stay together; every row of the global batch is in one.
        costs: tokens of each family.
    """
    plan = micro_batches(range(len(families)), costs, budget, accelerator)
    return [MicroBatch([row for family in batch.rows for row in families[family]], batch.weight) for batch in plan]


def over_rows(
    costs: Sequence[int], budget: int, accelerator: Accelerator, work: Callable[[list[int]], Sequence[Item]]
) -> list[Item]:
    """Results of all rows, in their order, on every process; each process works on its own micro-batches.

    Args:
        costs: tokens of each row.
        work: gives a result for each of the rows of a micro-batch; a plain Python object or a tensor on the CPU.
    """
    return over_families([[row] for row in range(len(costs))], costs, budget, accelerator, work)


def over_families(
    families: Sequence[Sequence[int]],
    costs: Sequence[int],
    budget: int,
    accelerator: Accelerator,
    work: Callable[[list[int]], Sequence[Item]],
) -> list[Item]:
    """`over_rows` where rows of one family are worked on together; see `family_batches`."""
    found: list[tuple[int, Item]] = []
    for batch in family_batches(families, costs, budget, accelerator):
        results = work(batch.rows)
        if batch.weight:
            found += zip(batch.rows, results, strict=True)
    return [result for _, result in sorted(gather_rows(found, accelerator), key=lambda pair: pair[0])]
