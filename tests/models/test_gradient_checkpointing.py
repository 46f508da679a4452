"""Recomputing activations must change memory and time, never a number; and sampling must still have its cache."""

import pytest
import torch

from align.core.seeds import Stream
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.loading import load
from align.models.roles import LanguageModel
from align.sampling.generation import Sampling, row_uniforms, sample

PROMPTS = [[70, 71, 72], [80, 81]]


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-llama", "tiny-t5"])
@pytest.mark.parametrize("rank", [0, 4])
def test_gradients_are_the_same_and_layers_are_read_twice(model: str, rank: int) -> None:
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        loaded = load(ModelConfig(model=model, lora_rank=rank, gradient_checkpointing=checkpointing), torch.float32)
        policy = LanguageModel(loaded.backbone, loaded.adapter)
        calls = [0]
        layer = next(
            m for n, m in loaded.backbone.model.named_modules() if n.endswith((".h.0", ".layers.0", "decoder.block.0"))
        )
        # A layer under checkpointing is called through `torch.utils.checkpoint`: hooks of what is inside it count.
        inner = next(module for module in layer.modules() if module is not layer and not list(module.children()))
        inner.register_forward_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        response = Padded.from_lists([[90, 91, 92, 1], [93, 1]])
        policy(Padded.from_lists(PROMPTS), response, response.mask()).sum().backward()
        gradients = {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}
        found.append((calls[0], gradients))
    (once, plain), (twice, recomputed) = found
    assert (once, twice) == (1, 2)
    assert plain.keys() == recomputed.keys()
    assert all(torch.allclose(plain[name], recomputed[name], atol=1e-6) for name in plain)


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-llama", "tiny-t5"])
def test_sampling_is_the_same(model: str) -> None:
    texts = []
    for checkpointing in (False, True):
        loaded = load(ModelConfig(model=model, gradient_checkpointing=checkpointing), torch.float32)
        sampling = Sampling(8)
        texts.append(
            sample(loaded.backbone, PROMPTS, row_uniforms(2, sampling, 7, Stream.ROLLOUT), sampling, frozenset({1})).ids
        )
        assert loaded.backbone.model.training == checkpointing
    assert texts[0] == texts[1]
