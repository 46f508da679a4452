"""Layers of models: those that a judge's head reads, and smaller models of some of them."""

import copy
import json

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.eval.truthfulness.judge import load_judge
from align.eval.truthfulness.train_judge import JudgeConfig, run_train_judge
from align.models.backbone import attention_kernel, model_class, with_every_layer, wrap
from align.models.backbone.layers import LAYER_COUNTS, LAYER_LISTS, LayerFeatures
from align.models.loading import load
from tests.models.architectures import DECODERS, ENCODER_DECODERS, make_model
from tests.models.encoders import write_encoder

PROMPT, RESPONSE = Padded.from_lists([[2, 5, 6, 1], [2, 9, 1]]), Padded.from_lists([[20, 21, 1], [22, 23, 24, 25, 1]])


def test_a_mix_by_hand(load_sharp):
    """Shares 1/4, 1/4, 1/2 of 4, 8, 2 are 1 + 2 + 1 = 4, doubled by gamma; at the start, the mean."""
    states = [torch.tensor([[number]]) for number in (4.0, 8.0, 2.0)]
    mix = LayerFeatures("mix", load_sharp("tiny-llama").backbone)
    assert mix(states).tolist() == [[pytest.approx(14 / 3)]]
    with torch.no_grad():
        mix.weights.copy_(torch.tensor([1.0, 1.0, 2.0]).log())
        mix.gamma.fill_(2.0)
    assert mix(states).tolist() == [[pytest.approx(8.0)]]
    mix(states).sum().backward()
    # d/dw_j = gamma s_j (h_j - sum s h): 2 x 1/4 x (4 - 4), 2 x 1/4 x (8 - 4), 2 x 1/2 x (2 - 4)
    assert mix.weights.grad.tolist() == pytest.approx([0.0, 2.0, -2.0])
    assert mix.gamma.grad.tolist() == pytest.approx([4.0])


@pytest.fixture(params=["bert", "xlnet", "albert", "modernbert", "tiny-llama", "tiny-t5"])
def load_again(request, sharpen, load_sharp, tmp_path):
    """Loads a model with states of its own in every layer, of four layers where it is an encoder."""
    if request.param.startswith("tiny"):
        return lambda: load_sharp(request.param).backbone
    folder = write_encoder(request.param, tmp_path / "encoder", sharpen, layers=4)
    return lambda: load(ModelConfig(model=folder), torch.float32, allow_reward_model=True).backbone


@torch.no_grad()
def test_a_head_reads_the_states_of_all_layers(load_again):
    """The last of four joined layers is the last layer; and a mix that is all last layer is the last layer."""
    plain, joined, mixed = (load_again() for _ in range(3))
    last = plain.features(PROMPT, RESPONSE)
    mix = LayerFeatures("mix", mixed)
    assert mix.width == 1
    assert (mixed.features(PROMPT, RESPONSE) - last).abs().max() > 0.01
    mix.weights[-1] = 100.0
    torch.testing.assert_close(mixed.features(PROMPT, RESPONSE), last, atol=1e-5, rtol=0)
    layers = len(mix.weights) - 1
    if layers < 4:
        with pytest.raises(UserError, match=f"^read_layers is last_four, but the model has {layers} layers"):
            LayerFeatures("last_four", joined)
        return
    features = LayerFeatures("last_four", joined)
    assert features.width == 4
    numbered = features([torch.full((1, 2), float(number)) for number in range(6)])
    assert numbered.tolist() == [[2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0]]
    found, size = joined.features(PROMPT, RESPONSE), plain.feature_size // 2
    assert found.shape == (2, 8 * size)
    mean_and_last = torch.cat([found[:, 3 * size : 4 * size], found[:, -size:]], dim=1)
    torch.testing.assert_close(mean_and_last, last, atol=1e-5, rtol=0)


def test_states_of_two_widths_are_not_mixed():
    with pytest.raises(UserError, match="the model projects its last states to another width; choose last"):
        LayerFeatures("mix", wrap(make_model("OPT, norms behind")))


@pytest.mark.parametrize("choice", [pytest.param("last_four", marks=pytest.mark.slow), "mix"])
def test_a_judge_keeps_its_layers(choice, sharpen, tmp_path):
    base = write_encoder("bert", tmp_path / "base", sharpen, layers=4)
    rows = [
        {"question": f"What is {number}?", "answer": "aeiou" if number % 2 else "zxcvb", "label": number % 2 == 1}
        for number in range(40)
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"dtype": "float32", "model": base, "epochs": 12, "words": False, "learning_rate": 0.02, "batch_size": 8}
    settings |= {"data": str(tmp_path / "answers.jsonl"), "output_dir": str(tmp_path / "judge"), "read_layers": choice}
    folder = run_train_judge(JudgeConfig(**settings))
    judge = load_judge(str(folder), "truth", Accelerator(cpu=True))
    assert judge.model.layers.choice == choice
    if choice == "mix":
        assert judge.model.layers.weights.abs().min() > 1e-5  # learned
    yes, no = judge.probabilities([("What is 3?", "aeiou"), ("What is 4?", "zxcvb")], 999, Accelerator(cpu=True))
    assert yes > 0.8
    assert no < 0.2
    with pytest.raises(UserError, match=r"^read_layers is .*, but must be last unless the backbone is frozen"):
        JudgeConfig(**settings, train_backbone=True)


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


def test_a_single_layer_is_refused():
    with pytest.raises(UserError, match="a single layer"):
        with_every_layer(model_of("Llama", 1), 2)


def test_layers_that_cannot_be_told_apart_are_refused():
    model = model_of("GPT-2")
    model.transformer.h = torch.nn.Sequential(*model.transformer.h)
    with pytest.raises(UserError, match="layers of a gpt2 cannot be left out"):
        with_every_layer(model, 2)
