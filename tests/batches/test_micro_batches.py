import numpy as np
import pytest
import torch
from accelerate import Accelerator

from align.batches.micro_batches import MAX_RESPONSES_PER_ROW, group_batches, group_tokens, pack_groups, prompt_groups
from align.models.backbone.decoder import pack_rows

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
        prompt, response, index = pack_groups(prompts, responses, batch.rows, torch.device("cpu"))
        owners = index.tolist() if index is not None else range(len(batch.rows))
        read: dict[int, list[int]] = {}
        texts = prompt.tolists()
        for owner, row in zip(owners, batch.rows, strict=True):
            read.setdefault(owner, []).append(row)
            assert texts[owner] == prompts[row]
        assert {tuple(rows) for rows in read.values()} <= planned
        assert pack_rows(prompt, response, index).ids.numel() <= BUDGET
