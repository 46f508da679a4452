import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.backbone import model_class, with_every_layer, wrap
from align.models.backbone.kinds import attention_kernel
from align.models.backbone.layers import LAYER_COUNTS, LAYER_LISTS
from tests.models.architectures import DECODERS, ENCODER_DECODERS

PROMPT, RESPONSE = Padded.from_lists([[2, 5, 6, 1], [2, 9, 1]]), Padded.from_lists([[20, 21, 1], [22, 23, 24, 25, 1]])
NAMES = ("Llama", "GPT-2", "Qwen 2", "SmolLM 3", "Gemma 2", "T5", "BART")
ENDS = ("o_proj", "down_proj", "c_proj", ".o", ".wo")
"""The last matrix of each part of a layer: where it is 0, the part adds nothing."""


def model_of(name, layers=5):
    found = next(each for each in (*DECODERS, *ENCODER_DECODERS) if each.name.startswith(name))
    config = copy.deepcopy(found.config)
    stored = config.to_dict()
    for key in LAYER_LISTS:
        if isinstance(stored.get(key), list):
            setattr(config, key, (stored[key] * layers)[:layers])
    for key in LAYER_COUNTS:
        if isinstance(stored.get(key), int):
            setattr(config, key, layers)
    torch.manual_seed(1)
    model = model_class(config).from_config(config, attn_implementation=attention_kernel(config)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    return model


def silence(model, step):
    """Let the layers that `step` leaves out add nothing."""
    for name, module in model.named_modules():
        if not name.endswith(ENDS) or not hasattr(module, "weight"):
            continue
        number = next(int(part) for part in name.split(".") if part.isdigit())
        if number % step:
            torch.nn.init.zeros_(module.weight)
            if getattr(module, "bias", None) is not None:
                torch.nn.init.zeros_(module.bias)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
@pytest.mark.parametrize("step", [2, 3])
def test_it_computes_what_the_model_would_if_the_other_layers_added_nothing(name, step):
    model = model_of(name)
    silence(model, step)
    smaller = with_every_layer(model, step)
    states = [wrap(each).hidden(PROMPT, RESPONSE) for each in (model, smaller)]
    for row, length in enumerate(RESPONSE.lengths.tolist()):
        torch.testing.assert_close(states[1][row, : length + 1], states[0][row, : length + 1], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_model_like_others(name, tmp_path):
    """`wrap` accepts it, the larger one is as it was, and its folder loads with transformers to the same logits."""
    model = model_of(name)
    before = wrap(model).hidden(PROMPT, RESPONSE)
    smaller = with_every_layer(model, 2)
    assert torch.equal(wrap(model).hidden(PROMPT, RESPONSE), before)
    assert smaller.config.num_hidden_layers == 3
    assert model.config.num_hidden_layers == 5
    smaller.save_pretrained(tmp_path)
    auto = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
    kernel = smaller.config._attn_implementation
    again, report = auto.from_pretrained(tmp_path, attn_implementation=kernel, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    states = [wrap(each.eval()).hidden(PROMPT, RESPONSE) for each in (smaller, again)]
    for row, length in enumerate(RESPONSE.lengths.tolist()):
        assert torch.equal(states[0][row, : length + 1], states[1][row, : length + 1])


def test_what_cannot_be_made_smaller_is_refused():
    with pytest.raises(UserError, match="a single layer"):
        with_every_layer(model_of("Llama", 1), 2)
    model = model_of("GPT-2")
    model.transformer.h = torch.nn.Sequential(*model.transformer.h)
    with pytest.raises(UserError, match="layers of a gpt2 cannot be left out"):
        with_every_layer(model, 2)
