import copy
import math
from itertools import product

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.integrations import flex_attention as integration

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.backbone import attention, wrap
from align.models.backbone.attention import block_mask, short_attention
from align.models.backbone.decoder import pack_rows, packed_mask
from align.models.backbone.kinds import use_block_attention
from align.models.loading import load
from tests.models.architectures import make_model

LOWEST = torch.finfo(torch.float32).min


def states(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def causal(length: int) -> torch.Tensor:
    return torch.zeros(1, 1, length, length).masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), LOWEST)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("masks", [1, 2], ids=["one mask", "a mask a row"])
@pytest.mark.parametrize("narrower", [0, 2])
def test_values_and_gradients_are_those_of_the_formula(groups, masks, narrower):
    """Heads of values may be narrower than those of keys."""
    batch, shared, length, width = 2, 2, 7, 6
    query, key = states(batch, groups * shared, length, width), states(batch, shared, length, width)
    value = states(batch, shared, length, width - narrower).flip(0, 2) + 1
    bias = causal(length).repeat(masks, 1, 1, 1)
    if masks == 2:
        bias[1, 0, 4:, 1:3] = LOWEST  # the second row hides two columns more
    weights = states(batch, groups * shared, length, width - narrower)
    found, expected = [], []
    for results, dtype in ((found, torch.float32), (expected, torch.float64)):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in (query, key, value)]
        if dtype == torch.float32:
            output = short_attention(*leaves, bias, 0.3)
        else:
            keys, values = (each.repeat_interleave(groups, 1) for each in leaves[1:])
            output = (0.3 * leaves[0] @ keys.transpose(2, 3) + bias).softmax(-1) @ values
        (output * weights.to(dtype)).sum().backward()
        results += [output, *(leaf.grad for leaf in leaves)]
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), right, atol=1e-5, rtol=1e-5)


def test_by_hand_for_two_columns():
    # Scores of the second row: 1 * 0 and 1 * 1, so weights 1 / (1 + e) and e / (1 + e) of the values 10 and 20.
    query, key, value = (torch.tensor(row).view(1, 1, 2, 1) for row in ([5.0, 1.0], [0.0, 1.0], [10.0, 20.0]))
    output = short_attention(query, key, value, causal(2), 1.0)
    assert output.flatten().tolist() == pytest.approx([10.0, (10 + 20 * math.e) / (1 + math.e)])


def test_in_bfloat16_it_is_as_near_to_the_formula_as_torch_is():
    query, key, value = (states(4, heads, 64, 32).bfloat16() for heads in (6, 2, 2))
    right = scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=True, enable_gqa=True)
    theirs = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    ours = short_attention(query, key, value, causal(64), 32**-0.5)
    off = [(each.double() - right).abs().mean().item() for each in (ours, theirs)]
    assert off[0] < 1.2 * off[1]


def in_bfloat16(backbone):
    return wrap(copy.deepcopy(backbone.model).bfloat16())


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_a_model_in_bfloat16_takes_it_up_to_its_longest_row(sharp_backbones, name, monkeypatch):
    backbone = in_bfloat16(sharp_backbones[name])
    backbone.model.set_attn_implementation(attention.SDPA)
    lengths = []

    def counted(query, *rest):
        lengths.append(query.shape[2])
        return short_attention(query, *rest)

    monkeypatch.setattr(attention, "short_attention", counted)
    layers = backbone.model.config.num_hidden_layers
    for total, calls in ((20, layers), (1, 0)):
        lengths.clear()
        with torch.no_grad():
            backbone.model(input_ids=torch.full((2, total), 5))
        assert lengths == [total] * calls
    monkeypatch.setattr(attention, "MAX_LENGTH", 19)
    lengths.clear()
    backbone.hidden(Padded.from_lists([[5] * 12]), Padded.from_lists([[6] * 8]))
    assert lengths == []


def test_a_model_whose_values_are_narrower_than_its_keys_is_read_in_bfloat16(sharpen):
    """DeepSeek V3's: of width 8, and keys of 8 + 4."""
    heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 264}
    config = DeepseekV3Config(**sizes, **heads, first_k_dense_replace=2)
    model = sharpen(AutoModelForCausalLM.from_config(config, attn_implementation=attention.SDPA))
    prompt, response = Padded.from_lists([[5, 6, 7]]), Padded.from_lists([[8, 9]])
    with torch.no_grad():
        expected = wrap(copy.deepcopy(model)).hidden(prompt, response)
        found = wrap(model.bfloat16()).hidden(prompt, response).float()
    torch.testing.assert_close(found, expected, atol=0.05 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_both_kernels_give_a_model_the_same_states_and_gradients(sharp_backbones, name, monkeypatch):
    backbone = in_bfloat16(sharp_backbones[name])
    backbone.model.set_attn_implementation(attention.SDPA)
    prompt, response = Padded.from_lists([[5, 6, 7], [8]]), Padded.from_lists([[9, 10], [11, 12, 13], [14]])

    def run():
        backbone.model.zero_grad()
        hidden = backbone.hidden(prompt, response, torch.tensor([0, 0, 1]))
        mask = response.mask()
        hidden[:, :-1][mask].float().square().mean().backward()
        return hidden[:, :-1][mask].float(), {
            n: w.grad.float() for n, w in backbone.named_parameters() if w.grad is not None
        }

    states_ours, ours = run()
    monkeypatch.setattr(attention, "MAX_LENGTH", 0)
    states_theirs, theirs = run()
    assert not torch.equal(states_ours, states_theirs)  # they are two kernels
    bound = 0.03 * states_theirs.abs().max().item()
    torch.testing.assert_close(states_ours, states_theirs, atol=bound, rtol=0)
    assert ours.keys() == theirs.keys()
    for weight, gradient in theirs.items():
        assert (ours[weight] - gradient).norm() <= 0.05 * gradient.norm() + 1e-6, weight


PROMPT = Padded.from_lists([[5, 6, 7], [8]])
RESPONSE = Padded.from_lists([[9, 10], [11, 12, 13], [14]])
OWNER = torch.tensor([0, 0, 1])


@pytest.fixture
def without_compiling(monkeypatch):
    """FlexAttention as torch computes it without a compiler, whose code for a processor takes minutes to make."""
    plain = lambda query, key, value, training=False, **more: flex_attention(query, key, value, **more)  # noqa: E731
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", plain)


@pytest.mark.parametrize("whole_prompt", [False, True])
def test_columns_that_are_seen_by_hand(whole_prompt):
    rows = pack_rows(PROMPT, RESPONSE, OWNER, multiple=4)
    assert rows.segments.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, -1, -1, -1, -1, -1, -1]]
    seen = packed_mask(rows.segments, torch.float32, whole_prompt)[0, 0] == 0
    first = [[1, 1, 1], [1, 1, 1], [1, 1, 1]] if whole_prompt else [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert seen.int().tolist() == [
        *([*each, 0, 0, 0, 0, 0] for each in first),
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 1, 1, 1],
    ]


def test_blocks_that_nobody_sees_are_left_out():
    """A prompt of a block and four responses of a block: each sees the prompt and itself, 9 blocks of 25 (causal: 15)."""
    lengths = torch.full((4,), 128)
    prompt, response = Padded(torch.ones(1, 128, dtype=torch.long), lengths[:1]), Padded(torch.ones(4, 128), lengths)
    response = response._replace(ids=response.ids.long())
    blocks = block_mask(pack_rows(prompt, response, torch.zeros(4, dtype=torch.long)).segments)
    assert blocks.to_dense()[0, 0].tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 0, 1],
    ]


OTHERS = ("GPT-NeoX (parallel layers)", "GPT-BigCode, multi-query", "Gemma 3", "Mixtral, experts")


@pytest.mark.usefixtures("without_compiling")
@pytest.mark.parametrize(
    ("name", "prefix_lm"), [*product(("tiny-llama", "tiny-gpt2"), (False, True)), *product(OTHERS, (False,))]
)
@torch.no_grad()
def test_states_are_those_of_the_dense_mask_and_of_separate_rows(name, prefix_lm, load_sharp, sharpen):
    backbone = wrap(sharpen(make_model(name))) if name in OTHERS else load_sharp(name, prefix_lm=prefix_lm).backbone
    backbone.shares_prompts = True  # loading would find out
    expected = backbone.hidden(PROMPT, RESPONSE, OWNER)
    alone = backbone.hidden(PROMPT.rows(OWNER), RESPONSE)
    use_block_attention(backbone)
    found = backbone.hidden(PROMPT, RESPONSE, OWNER)
    real = torch.cat([torch.ones(3, 1, dtype=torch.bool), RESPONSE.mask()], dim=1)
    for other in (expected, alone):
        assert torch.allclose(found[real], other[real], rtol=0, atol=1e-5 * float(other[real].abs().max()))


@pytest.mark.usefixtures("without_compiling")
def test_it_is_flex_attention_that_reads_shared_rows_and_nothing_else(load_sharp, monkeypatch):
    backbone, calls = load_sharp("tiny-llama").backbone, []
    plain = integration.compile_friendly_flex_attention
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", lambda *a, **b: calls.append(1) or plain(*a, **b))
    use_block_attention(backbone)
    with torch.no_grad():
        backbone.hidden(PROMPT.rows(OWNER), RESPONSE)
        assert calls == []
        backbone.hidden(PROMPT, RESPONSE, OWNER)
    assert len(calls) == backbone.model.config.num_hidden_layers


def test_who_cannot_is_told(sharp_folders, load_sharp):
    with pytest.raises(UserError, match="block_attention: FlexAttention has no gradient on a processor"):
        load(ModelConfig(model=sharp_folders["tiny-llama"], block_attention=True), torch.float32)
    with pytest.raises(UserError, match="block_attention is for decoders"):
        use_block_attention(load_sharp("tiny-t5").backbone)
    backbone = load_sharp("tiny-llama").backbone
    backbone.model.set_attn_implementation("eager")
    with pytest.raises(UserError, match="the attention of llama is its own"):
        use_block_attention(backbone)
