"""What fits a model's context, how many tokens a row holds in memory, and which class an architecture belongs to."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.backbone import adapter_settings, model_class
from tests.models.small_models import NAMES


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


def test_kinds(backbones):
    assert {name for name in NAMES if not backbones[name].prompt_in_row} == {"tiny-t5", "bart"}
    assert adapter_settings(backbones["bart"].model)["task_type"] == "SEQ_2_SEQ_LM"
    assert adapter_settings(backbones["bloom"].model)["task_type"] == "CAUSAL_LM"
    assert model_class(backbones["tiny-t5"].model.config) is AutoModelForSeq2SeqLM
    assert model_class(backbones["tiny-llama"].model.config) is AutoModelForCausalLM
