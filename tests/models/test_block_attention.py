"""Shared rows read by blocks of a mask: the blocks are those of the dense mask, and so are the states."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations import flex_attention as integration

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.backbone import wrap
from align.models.backbone.layout import block_mask, pack_rows, packed_mask
from align.models.loading import load
from tests.models.architectures import make_model

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


@pytest.mark.usefixtures("without_compiling")
@pytest.mark.parametrize("prefix_lm", [False, True])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_states_are_those_of_the_dense_mask(load_sharp, name, prefix_lm):
    backbone = load_sharp(name, prefix_lm=prefix_lm).backbone
    with torch.no_grad():
        expected = backbone.hidden(PROMPT, RESPONSE, OWNER)
        alone = backbone.hidden(PROMPT.rows(OWNER), RESPONSE)
        backbone.use_block_attention()
        found = backbone.hidden(PROMPT, RESPONSE, OWNER)
    real = torch.cat([torch.ones(3, 1, dtype=torch.bool), RESPONSE.mask()], dim=1)
    for other in (expected, alone):
        assert torch.allclose(found[real], other[real], rtol=0, atol=1e-5 * float(other[real].abs().max()))


@pytest.mark.usefixtures("without_compiling")
@pytest.mark.parametrize("name", ["GPT-NeoX (parallel layers)", "GPT-BigCode, multi-query", "Gemma 3", "Mixtral, experts"])
def test_other_decoders_take_it(name, sharpen):
    backbone = wrap(sharpen(make_model(name)))
    backbone.shares_prompts = True  # loading would find out
    with torch.no_grad():
        expected = backbone.hidden(PROMPT, RESPONSE, OWNER)
        backbone.use_block_attention()
        found = backbone.hidden(PROMPT, RESPONSE, OWNER)
    real = torch.cat([torch.ones(3, 1, dtype=torch.bool), RESPONSE.mask()], dim=1)
    assert torch.allclose(found[real], expected[real], rtol=0, atol=1e-5 * float(expected[real].abs().max()))


@pytest.mark.usefixtures("without_compiling")
def test_it_is_flex_attention_that_reads_shared_rows_and_nothing_else(load_sharp, monkeypatch):
    backbone, calls = load_sharp("tiny-llama").backbone, []
    plain = integration.compile_friendly_flex_attention
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", lambda *a, **b: calls.append(1) or plain(*a, **b))
    backbone.use_block_attention()
    with torch.no_grad():
        backbone.hidden(PROMPT.rows(OWNER), RESPONSE)
        assert calls == []
        backbone.hidden(PROMPT, RESPONSE, OWNER)
    assert len(calls) == backbone.model.config.num_hidden_layers


def test_who_cannot_is_told(sharp_folders, load_sharp):
    with pytest.raises(UserError, match="block_attention: FlexAttention has no gradient on a processor"):
        load(ModelConfig(model=sharp_folders["tiny-llama"], block_attention=True), torch.float32)
    with pytest.raises(UserError, match="block_attention is for decoders"):
        load_sharp("tiny-t5").backbone.use_block_attention()
    backbone = load_sharp("tiny-llama").backbone
    backbone.model.set_attn_implementation("eager")
    with pytest.raises(UserError, match="the attention of llama is its own"):
        backbone.use_block_attention()
