import functools

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.backbone import Backbone, wrap
from tests.conftest import TINY
from tests.models.architectures import BART, make_model
from tests.models.reading import PROMPTS, RESPONSES, assert_reads_alike
from tests.refusals import refusal

# 13 tokens fit a context of 16; the row that prompt 0 shares with its responses is longer, but positions restart.
SHORT_GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)
SHORT = {
    "gpt2-short": (GPT2LMHeadModel, SHORT_GPT2),
    "bart-short": (BartForConditionalGeneration, BartConfig(**BART | {"max_position_embeddings": 16})),
}


@pytest.fixture(scope="module")
def backbones(sharp_backbones, sharpen):
    """The three tiny models and those with a short context, sharpened, and some of other forms: do not change them."""
    forms = {"bloom": "Bloom", "window": "Mistral, sliding window", "no window": "Llama 3"}
    made = {name: wrap(sharpen(kind(config))) for name, (kind, config) in SHORT.items()}
    return made | dict(sharp_backbones) | {short: wrap(make_model(name)) for short, name in forms.items()}


@pytest.mark.parametrize("name", [*TINY, *SHORT])
def test_loaded_models_and_short_contexts_are_read_alike_in_every_way(name, backbones):
    assert_reads_alike(backbones[name])


def test_a_prompt_between_others_may_have_no_response():
    backbone = wrap(GPT2LMHeadModel(SHORT_GPT2).eval())
    responses = [RESPONSES[0], RESPONSES[1], RESPONSES[4]]
    with torch.no_grad():
        found = backbone.hidden(Padded.from_lists(PROMPTS), Padded.from_lists(responses), torch.tensor([0, 0, 2]))
    for place, (prompt_of_response, ids) in enumerate(zip((0, 0, 2), responses, strict=True)):
        with torch.no_grad():
            expected = backbone.hidden(Padded.from_lists([PROMPTS[prompt_of_response]]), Padded.from_lists([ids]))[0]
        torch.testing.assert_close(found[place, : len(ids) + 1], expected, atol=1e-5, rtol=0)


def test_an_architecture_with_logits_of_its_own_kind_is_refused(sharpen, monkeypatch):
    """They need more than the last hidden state and the vocabulary matrix."""
    forward = GPT2LMHeadModel.forward

    @functools.wraps(forward)  # it looks like the library's own
    def scaled(self, *arguments, **named):
        output = forward(self, *arguments, **named)
        return output | {"logits": output.logits * 1.5}

    monkeypatch.setattr(GPT2LMHeadModel, "forward", scaled)
    model = sharpen(GPT2LMHeadModel(SHORT_GPT2))
    with pytest.raises(UserError, match=r"^model type 'gpt2': its logits are not a plain function .* not supported$"):
        wrap(model)
    assert isinstance(wrap(model, check=False), Backbone)


def test_the_check_leaves_the_mode_of_the_model_as_it_was(sharpen):
    model = sharpen(GPT2LMHeadModel(SHORT_GPT2))
    assert not wrap(model).model.training
    assert wrap(model.train()).model.training


@torch.no_grad()
def test_select_can_also_reorder_rows(backbone):
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2]]
    state, _ = backbone.prefill(Padded.from_lists(prompts))
    state.select(torch.tensor([2, 0]))
    hidden = backbone.decode_step(state, torch.tensor([33, 33]))
    for place, row in enumerate((2, 0)):
        expected = backbone.hidden(Padded.from_lists([prompts[row]]), Padded.from_lists([[33]]))[0, 1]
        torch.testing.assert_close(hidden[place], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "fitting", "too_long"),
    [
        ("gpt2-short", [(10, 6)], [(10, 7)]),  # a context of 16 for both
        ("bloom", [(10_000, 10_000)], []),  # ALiBi has no table of positions
        (
            "bart-short",
            [(16, 15)],
            [(16, 16), (17, 1)],
        ),  # a table of 16 each; a start token
        ("tiny-t5", [(10_000, 10_000)], []),  # relative positions
    ],
)
def test_what_fits_the_context(name, fitting, too_long, backbones):
    assert all(backbones[name].fits(*lengths) for lengths in fitting)
    assert not any(backbones[name].fits(*lengths) for lengths in too_long)
    for lengths in too_long[:1]:
        line = refusal(backbones[name].require_fit, *lengths, "data.jsonl: record 3")
        assert line.startswith(f"data.jsonl: record 3: {lengths[0]} prompt and {lengths[1]} response tokens do not fit")
        assert "context of 16" in line


def test_a_text_at_the_limit_can_be_read_and_tokens_are_counted(backbones):
    for name, prompt, response in (("gpt2-short", 10, 6), ("bart-short", 16, 15)):
        with torch.no_grad():
            hidden = backbones[name].hidden(Padded.from_lists([[5] * prompt]), Padded.from_lists([[6] * response]))
        assert torch.isfinite(hidden).all()
    assert backbones["tiny-gpt2"].tokens_in_memory(10, [3, 5]) == 18  # one row: 10 + 3 + 5
    assert backbones["bloom"].tokens_in_memory(10, [3, 5]) == 30  # two rows of 10 + 5
    assert backbones["tiny-t5"].tokens_in_memory(10, [3, 5]) == 22  # the prompt once, and two rows of a start token and 5
    windowed, whole = backbones["window"], backbones["no window"]
    assert windowed.tokens_in_memory(6, [7, 1]) == 2 * (6 + 7)  # beyond the window of 8, each text gets a row
    assert windowed.tokens_in_memory(2, [4, 2]) == 2 + 4 + 2
    assert whole.tokens_in_memory(6, [7, 1]) == 6 + 7 + 1
