"""The shapes of DeepSpeed-Chat's published row, and a tiny run."""

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from benchmarks.deepspeed_chat import SHAPES, measure


@pytest.mark.parametrize(("shape", "billions"), [("actor", 1.31), ("reward", 0.331)])
def test_the_shapes_have_the_sizes_of_their_names(shape, billions):
    with torch.device("meta"):
        model = OPTForCausalLM(OPTConfig(**{"num_hidden_layers": 24} | SHAPES[shape]))
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.full
@pytest.mark.slow
def test_a_tiny_run_tells_where_the_time_goes(tmp_path):
    figures = measure(tmp_path, 4, 8, ("tiny", "tiny"), {"dtype": "float32"})
    assert figures["all tokens/s"] == pytest.approx(2 * figures["new tokens/s"], rel=0.2)  # a response may end by chance
    assert sum(figures[part] for part in ("sample", "score", "record", "learn")) == pytest.approx(1.0, abs=1e-5)
    assert 0 < figures["MFU"] < 1
