from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from align.batches.micro_batches import (
    MAX_RESPONSES_PER_ROW,
    MicroBatch,
    group_batches,
    group_tokens,
    micro_batches,
    pack_groups,
    prompt_groups,
)
from align.models.backbone.decoder import pack_rows

QUICK = settings(deadline=None, max_examples=40)
BUDGET = 8192


@pytest.mark.parametrize("samples", [4, 16, 64])
def test_rows_that_were_cut_stay_apart_and_micro_batches_within_their_budget(sharp_backbones, samples):
    backbone, random = sharp_backbones["tiny-llama"], np.random.default_rng(samples)
    distinct = [[5 + number] * int(random.integers(20, 400)) for number in range(512 // samples)]
    prompts = [distinct[row // samples] for row in range(512)]
    responses = [[7] * int(random.integers(10, 512)) for _ in range(512)]
    groups = prompt_groups(backbone, prompts, responses, range(512), BUDGET)
    plan = group_batches(groups, group_tokens(backbone, prompts, responses, groups), BUDGET, Accelerator(cpu=True))
    assert sorted(row for batch in plan for row in batch.rows) == list(range(512))
    assert any(len(group) == MAX_RESPONSES_PER_ROW for group in groups) == (samples > 4)
    planned = {tuple(group) for group in groups}
    for batch in plan:
        inputs = pack_groups(prompts, responses, batch.groups, torch.device("cpu"))
        index = inputs.prompt_of_response
        owners = index.tolist() if index is not None else range(len(batch.rows))
        read: dict[int, list[int]] = {}
        texts = inputs.prompt.tolists()
        for owner, row in zip(owners, batch.rows, strict=True):
            read.setdefault(owner, []).append(row)
            assert texts[owner] == prompts[row]
        assert {tuple(rows) for rows in read.values()} <= planned
        assert pack_rows(inputs.prompt, inputs.response, index).ids.numel() <= BUDGET


class Process:
    """What micro-batches ask of an Accelerator."""

    def __init__(self, rank, count):
        self.process_index, self.num_processes, self.device = rank, count, SimpleNamespace(type="cpu")


def processes(count):
    return [Process(rank, count) for rank in range(count)]


def test_micro_batches_by_hand():
    # Lengths by row: 40: 3, 41: 10, 42: 5, 43: 4. Two processes take turns from the longest: 41, 43 and 42, 40.
    plans = [micro_batches([40, 41, 42, 43], [3, 10, 5, 4], 10, process) for process in processes(2)]
    assert plans[0] == [MicroBatch([[41]]), MicroBatch([[43]])]
    assert plans[1] == [MicroBatch([[42], [40]]), MicroBatch([[40]], weight=0.0)]  # a filler with the shortest row
    # Beside a row of 100 tokens, one of 70 brings 30 of padding; the next one would bring it to 65, above 64 on a CPU.
    (alone,) = processes(1)
    assert micro_batches([0, 1, 2], [100, 70, 65], 1000, alone) == [MicroBatch([[0], [1]]), MicroBatch([[2]])]
    assert micro_batches([0, 1, 2], [100, 70, 66], 1000, alone) == [MicroBatch([[0], [1], [2]])]


@QUICK
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 120), st.integers(1, 5))
def test_micro_batches_share_out_every_row_once_and_keep_processes_in_step(lengths, budget, world):
    rows = [100 + i for i in range(len(lengths))]
    plans = [micro_batches(rows, lengths, budget, process) for process in processes(world)]
    assert len({len(plan) for plan in plans}) == 1
    real = [row for plan in plans for batch in plan if batch.weight == 1.0 for row in batch.rows]
    assert sorted(real) == rows
    assert all(batch.weight in (0.0, 1.0) and batch.rows for plan in plans for batch in plan)
    for plan in plans:
        for batch in plan:
            assert len(batch.rows) == 1 or len(batch.rows) * max(lengths[row - 100] for row in batch.rows) <= budget
