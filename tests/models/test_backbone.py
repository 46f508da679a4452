"""The backbone contract: the same numbers alone and in a batch, in one row and in several, in one pass and step by step."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
)

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.backbone import Backbone, wrap
from align.models.roles import RewardModel, ScalarHead
from align.reward.loss import pairs_of, ranking_loss
from tests.conftest import TINY

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16]]
RESPONSES = [[20, 21, 22, 23, 24, 25, 26], [27], [28, 29, 30], [31, 32, 33, 34], [35, 36, 37, 38, 39], [40, 41]]
OWNER = [0, 0, 0, 1, 2, 2]
RANKS = [[1, 3, 2], [1], [2, 1]]
PAIRS = pairs_of(RANKS, [0.0, 0.0, 0.5])


WIDTH = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = WIDTH | {"num_key_value_heads": 2}
BART = {f"{half}_{part}": n for half in ("encoder", "decoder") for part, n in (("layers", 2), ("attention_heads", 4))}
BART |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32, "vocab_size": 64, "dropout": 0.0}
# Windows of 8 tokens on rows of up to 13: a path that forgets the window cannot pass.
CONFIGS = {
    "mistral": MistralConfig(**GROUPED, max_position_embeddings=64, sliding_window=None),
    "mistral-window": MistralConfig(**GROUPED, max_position_embeddings=64, sliding_window=8),
    "gemma2-window": Gemma2Config(
        **GROUPED, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=2.0, sliding_window=8
    ),
    # 13 tokens fit a context of 16; the shared row of prompt 0 is longer, but its positions restart.
    "gpt2-short": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16),
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    "bart": BartConfig(**BART, max_position_embeddings=16),
}
NAMES = (*TINY, *CONFIGS)


@pytest.fixture(scope="module")
def backbones(sharp_backbones, sharpen):
    """The three tiny models and those of `CONFIGS`, sharpened, by their names: do not change them."""
    made = dict(sharp_backbones)
    for name, config in CONFIGS.items():
        auto = AutoModelForSeq2SeqLM if name == "bart" else AutoModelForCausalLM
        made[name] = wrap(sharpen(auto.from_config(copy.deepcopy(config))))
    return made


@pytest.fixture(params=NAMES)
def any_backbone(request, backbones):
    return backbones[request.param]


@torch.no_grad()
def alone(backbone, row):
    """[length+1, H] of one response by itself."""
    return backbone.hidden(Padded.from_lists([PROMPTS[OWNER[row]]]), Padded.from_lists([RESPONSES[row]]))[0]


def assert_rows_equal(found, backbone, rows, tolerance=1e-5):
    for place, row in enumerate(rows):
        expected = alone(backbone, row)
        torch.testing.assert_close(found[place, : len(expected)], expected, atol=tolerance, rtol=0)


# ---------------------------------------------------------------------------------------------- states, whatever the batch


def test_the_models_are_far_from_uniform(any_backbone):
    # With near-uniform outputs, wrong states would pass as right ones.
    assert any_backbone.logits(alone(any_backbone, 0)).std() > 1.0


def test_a_row_is_the_same_alone_and_in_a_batch_in_any_order(any_backbone):
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 0, 2]):
        prompt = Padded.from_lists([PROMPTS[OWNER[row]] for row in order])
        with torch.no_grad():
            found = any_backbone.hidden(prompt, Padded.from_lists([RESPONSES[row] for row in order]))
        assert found.shape == (6, 8, any_backbone.hidden_size)  # T = 7, one state more than tokens
        assert_rows_equal(found, any_backbone, order)


def test_a_prompt_between_others_may_have_no_response():
    config = copy.deepcopy(CONFIGS["gpt2-short"])
    backbone = wrap(GPT2LMHeadModel(config).eval())
    responses = [RESPONSES[0], RESPONSES[1], RESPONSES[4]]
    with torch.no_grad():
        found = backbone.hidden(Padded.from_lists(PROMPTS), Padded.from_lists(responses), torch.tensor([0, 0, 2]))
    for place, (prompt_index, ids) in enumerate(zip((0, 0, 2), responses, strict=True)):
        with torch.no_grad():
            expected = backbone.hidden(Padded.from_lists([PROMPTS[prompt_index]]), Padded.from_lists([ids]))[0]
        torch.testing.assert_close(found[place, : len(ids) + 1], expected, atol=1e-5, rtol=0)


def test_what_stands_in_the_padding_does_not_matter(any_backbone):
    prompt, response = Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES)
    other = [Padded(batch.ids.masked_fill(~batch.mask(), 50), batch.lengths) for batch in (prompt, response)]
    with torch.no_grad():
        found = any_backbone.hidden(*other, torch.tensor(OWNER))
    assert_rows_equal(found, any_backbone, range(6))


def test_a_text_beyond_the_sliding_window_gets_a_row_of_its_own(backbones):
    # 6 + 7 tokens are beyond the window of 8, 2 + 4 and 2 + 2 are not.
    windowed, whole = backbones["mistral-window"], backbones["mistral"]
    assert windowed.tokens_in_memory(6, [7, 1]) == 2 * (6 + 7)
    assert windowed.tokens_in_memory(2, [4, 2]) == 2 + 4 + 2
    assert whole.tokens_in_memory(6, [7, 1]) == 6 + 7 + 1


# --------------------------------------------------------------------------------------- the ranking loss in a shared row


def ranking_gradients(backbone, shared):
    """Loss and gradients of the ranking loss, with prompts read once or once for every response."""
    backbone = copy.deepcopy(backbone)
    torch.manual_seed(3)
    model = RewardModel(backbone, ScalarHead(backbone.hidden_size, bias=False), None)
    if shared:
        rewards = model(Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES), torch.tensor(OWNER))
    else:
        rows = zip(OWNER, RESPONSES, strict=True)
        each = [model(Padded.from_lists([PROMPTS[prompt_index]]), Padded.from_lists([ids])) for prompt_index, ids in rows]
        rewards = torch.cat(each)
    loss = ranking_loss(rewards, PAIRS)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_the_ranking_loss_of_a_shared_row_equals_separate_rows_in_loss_and_gradients(any_backbone):
    (loss, gradients), (expected, theirs) = (ranking_gradients(any_backbone, shared) for shared in (True, False))
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    assert set(gradients) == set(theirs)
    assert max(gradient.abs().max() for gradient in theirs.values()) > 1e-2
    for name, gradient in gradients.items():
        # Elements of a gradient are sums over many places: 1e-5 of the tensor's largest element, at least of 1.
        bound = 1e-5 * max(1.0, float(theirs[name].abs().max()))
        torch.testing.assert_close(gradient, theirs[name], atol=bound, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


# ------------------------------------------------------------------------------------------------------------------ logits


def own_logits(backbone, prompt, response):
    """What the transformers class itself says about the response tokens and the one after them: [T+1, V]."""
    ids = torch.tensor([response])
    if backbone.prompt_in_row:
        whole = torch.cat([torch.tensor([prompt]), ids], dim=1)
        return backbone.model(input_ids=whole).logits[0, len(prompt) - 1 :]
    start = torch.tensor([[backbone.model.config.decoder_start_token_id]])
    decoder_ids = torch.cat([start, ids], dim=1)
    return backbone.model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoder_ids).logits[0]


@torch.no_grad()
def test_logits_are_the_models_own(any_backbone):
    for row in range(6):
        found = any_backbone.logits(alone(any_backbone, row))
        expected = own_logits(any_backbone, PROMPTS[OWNER[row]], RESPONSES[row])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


class ScaledGPT2(GPT2LMHeadModel):
    """A model whose logits need more than the last hidden state and the vocabulary matrix."""

    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        output.logits = output.logits * 1.5
        return output


def test_an_architecture_with_logits_of_its_own_kind_is_refused(sharpen):
    model = sharpen(ScaledGPT2(CONFIGS["gpt2-short"]))
    with pytest.raises(UserError, match=r"^model type 'gpt2': its logits are not a plain function .* not supported$"):
        wrap(model)
    assert isinstance(wrap(model, check=False), Backbone)


def test_the_check_leaves_the_mode_of_the_model_as_it_was(sharpen):
    model = sharpen(GPT2LMHeadModel(CONFIGS["gpt2-short"]))
    assert not wrap(model).model.training
    assert wrap(model.train()).model.training


# ------------------------------------------------------------------------------------------------------- step after step


@torch.no_grad()
def test_prefill_and_decode_step_follow_hidden_while_rows_leave_the_batch(any_backbone):
    state, hidden = any_backbone.prefill(Padded.from_lists([PROMPTS[prompt_index] for prompt_index in OWNER]))
    expected = [alone(any_backbone, row) for row in range(6)]
    alive = list(range(6))
    for step in range(8):
        for place, row in enumerate(alive):
            torch.testing.assert_close(hidden[place], expected[row][step], atol=1e-5, rtol=0)
        keep = [place for place, row in enumerate(alive) if len(RESPONSES[row]) > step]
        if len(keep) < len(alive):
            state.select(torch.tensor(keep, dtype=torch.long))
            alive = [alive[place] for place in keep]
        if alive:
            hidden = any_backbone.decode_step(state, torch.tensor([RESPONSES[row][step] for row in alive]))
    assert alive == []  # the longest response has 7 tokens: every state was compared


@torch.no_grad()
def test_select_can_also_reorder_rows(backbone):
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2]]
    state, _ = backbone.prefill(Padded.from_lists(prompts))
    state.select(torch.tensor([2, 0]))
    hidden = backbone.decode_step(state, torch.tensor([33, 33]))
    for place, row in enumerate((2, 0)):
        expected = backbone.hidden(Padded.from_lists([prompts[row]]), Padded.from_lists([[33]]))[0, 1]
        torch.testing.assert_close(hidden[place], expected, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------- what fits a context


def test_fits_counts_prompt_and_response_where_one_row_holds_both(backbones):
    short = backbones["gpt2-short"]  # a context of 16
    assert short.context_length == 16
    assert short.fits(10, 6)
    assert not short.fits(10, 7)
    # ALiBi has no table of positions.
    assert backbones["bloom"].fits(10_000, 10_000)


def test_fits_of_encoder_decoders(backbones):
    bart, t5 = backbones["bart"], backbones["tiny-t5"]  # BART: a table of 16 for each half; T5: relative positions
    assert bart.fits(16, 15)  # the decoder also reads its start token
    assert not bart.fits(16, 16)
    assert not bart.fits(17, 1)
    assert t5.fits(10_000, 10_000)


def test_a_text_at_the_limit_can_be_read(backbones):
    for name, prompt, response in (("gpt2-short", 10, 6), ("bart", 16, 15)):
        with torch.no_grad():
            hidden = backbones[name].hidden(Padded.from_lists([[5] * prompt]), Padded.from_lists([[6] * response]))
        assert torch.isfinite(hidden).all()


def test_require_fit_names_place_lengths_and_remedy(backbones):
    backbones["gpt2-short"].require_fit(10, 6, "data.jsonl: record 3")
    with pytest.raises(UserError) as caught:
        backbones["gpt2-short"].require_fit(10, 7, "data.jsonl: record 3")
    assert str(caught.value).startswith("data.jsonl: record 3: 10 prompt and 7 response tokens do not fit")
    assert "context of 16" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_row_tokens(backbones):
    assert backbones["tiny-gpt2"].tokens_in_memory(10, [3, 5]) == 18  # one row: 10 + 3 + 5
    assert backbones["bloom"].tokens_in_memory(10, [3, 5]) == 30  # two rows of 10 + 5
    assert backbones["tiny-t5"].tokens_in_memory(10, [3, 5]) == 22  # the prompt once, and two rows of a start token and 5
