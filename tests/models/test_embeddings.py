import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from align.model_registry.tiny import BOS, EOS, PAD, VOCABULARY
from align.models.backbone import wrap
from align.models.backbone.embeddings import sum_embedding_gradients_in_float32

IDS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


class OneEmbedding(torch.nn.Module):
    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 4, padding_idx=padding_idx, dtype=torch.bfloat16)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tokens=st.integers(1, 5000),
    used=st.integers(1, 8),
    padding_idx=st.sampled_from([None, 0, 3]),
    seed=st.integers(0, 99),
)
def test_the_gradient_of_a_frequent_token_is_a_float32_sum(tokens, used, padding_idx, seed):
    generator = torch.Generator().manual_seed(seed)
    module = OneEmbedding(padding_idx)
    sum_embedding_gradients_in_float32(module)
    ids = torch.randint(used, (tokens,), generator=generator)
    slopes = (1 + torch.randn(tokens, 4, generator=generator)).bfloat16()
    (module.table(ids) * slopes).sum().backward()
    expected = torch.zeros(8, 4, dtype=torch.float64).index_add_(0, ids, slopes.double())
    if padding_idx is not None:
        expected[padding_idx] = 0
    sizes = torch.zeros(8, 4, dtype=torch.float64).index_add_(0, ids, slopes.double().abs())
    errors = (module.table.weight.grad.double() - expected).abs()
    assert bool((errors <= 2**-8 * expected.abs() + 2**-23 * tokens * sizes + 1e-9).all())


@pytest.mark.parametrize("trained", [False, True])
def test_a_model_reads_the_same_and_only_trained_embeddings_have_gradients(trained):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, **IDS)).bfloat16()
    model.model.embed_tokens.weight.requires_grad_(trained)
    ids = torch.randint(VOCABULARY, (2, 9))
    before = model(input_ids=ids).logits
    wrap(model, check=False)
    after = model(input_ids=ids).logits
    assert torch.equal(before, after)
    after.float().sum().backward()
    assert (model.model.embed_tokens.weight.grad is not None) == trained
