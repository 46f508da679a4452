"""How many tokens are sampled at once, by hand arithmetic."""

from types import SimpleNamespace

import pytest
import torch

from align.sampling.engines import sampling_tokens
from align.sampling.generation import Sampling


def memory(device, free, resident):
    return SimpleNamespace(device=torch.device(device), free=lambda: free, resident_bytes=resident)


def test_a_processor_keeps_the_default(sharp_backbones):
    assert sampling_tokens(memory("cpu", 2**40, 0), sharp_backbones["tiny-llama"], 64) == Sampling.batch_tokens


@pytest.mark.parametrize(("free", "resident"), [(2**30, 0), (2**31, 2**30), (2**30 + 2**26, 0)])
def test_a_gpu_takes_half_of_what_weights_leave(sharp_backbones, free, resident):
    # A token takes 512 bytes of cache (2 layers, 2 heads of 16, keys and values in float32), a row of 64 tokens
    # 264 x 24 of logits: 611 a token. Half of 2^30 holds 878,000 of them, and 2^19 is the power of two below.
    assert sampling_tokens(memory("cuda", free, resident), sharp_backbones["tiny-llama"], 64) == 2**19


def test_a_row_is_sampled_where_there_is_no_room_at_all(sharp_backbones):
    found = sampling_tokens(memory("cuda", 2**20, 2**30), sharp_backbones["tiny-llama"], 100)
    assert found == 64
