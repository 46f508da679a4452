"""Layers that a judge's head reads: by hand, for every kind of backbone, and saved with the judge."""

import json

import pytest
import torch
from accelerate import Accelerator

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.eval.truthfulness.judge import load_judge
from align.eval.truthfulness.train_judge import JudgeConfig, run_train_judge
from align.models.backbone import wrap
from align.models.backbone.layers import LayerFeatures
from align.models.loading import load
from tests.models.architectures import make_model
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
    assert LayerFeatures("last_four", joined).width == 4
    found, size = joined.features(PROMPT, RESPONSE), plain.feature_size // 2
    assert found.shape == (2, 8 * size)
    mean_and_last = torch.cat([found[:, 3 * size : 4 * size], found[:, -size:]], dim=1)
    torch.testing.assert_close(mean_and_last, last, atol=1e-5, rtol=0)


def test_states_of_two_widths_are_not_mixed():
    with pytest.raises(UserError, match="the model projects its last states to another width; choose last"):
        LayerFeatures("mix", wrap(make_model("OPT, norms behind")))


@pytest.mark.parametrize("choice", [pytest.param("last_four", marks=pytest.mark.full), "mix"])
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
