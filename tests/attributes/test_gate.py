"""The gate of an attribute model: by hand, what it learns from, a planted case end to end, and what is refused."""

import math

import pytest
import torch
from accelerate import Accelerator

from align.attributes import AttributeConfig, AttributeTrainer
from align.attributes.model import AttributeModel, Gate, Head, load_attribute_model
from align.attributes.scoring import HeadScorer
from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.reward.rankings import reward_rankings
from align.tokenization.encoded import SampledResponse
from tests.models.encoders import write_encoder

HEADS = [Head("digits", "binary"), Head("rating", "scale"), Head("preference", "ranking")]


def test_a_gate_by_hand():
    gate = Gate(2, 2)
    with torch.no_grad():
        for weight in gate.parameters():
            weight.zero_()
        gate.inner.weight[0] = torch.tensor([1.0, -1.0])
        gate.outer.weight[0, 0] = math.log(3)
        gate.worth.copy_(torch.tensor([2.0, -1.0]))
    prompts = torch.tensor([[3.0, 2.0], [2.0, 3.0]], dtype=torch.bfloat16)
    # The inner layer says relu(3 - 2) = 1 and relu(2 - 3) = 0: the weights are 3 to 1, and 1 to 1.
    assert gate.weights(prompts).flatten().tolist() == pytest.approx([0.75, 0.25, 0.5, 0.5])
    scores = torch.tensor([[0.4, 0.8], [1.0, 0.5]])
    assert gate(prompts, scores).tolist() == pytest.approx([0.75 * 2 * 0.4 - 0.25 * 0.8, 0.5 * 2 * 1.0 - 0.5 * 0.5])


def read(model, prompts, responses):
    owner = torch.tensor([number for number, of_prompt in enumerate(responses) for _ in of_prompt])
    flat = [ids for of_prompt in responses for ids in of_prompt]
    return model(Padded.from_lists(prompts), Padded.from_lists(flat), owner)


def test_rankings_teach_the_gate_alone_and_a_response_is_weighed_by_its_prompt(load_sharp, tiny_name):
    torch.manual_seed(0)
    model = AttributeModel(load_sharp(tiny_name).backbone, HEADS, gated=True)
    prompts, responses = [[9, 10, 11], [30, 31]], [[[20, 21], [22]], [[23, 24, 25]]]
    together = read(model, prompts, responses)
    alone = [
        read(model, [prompt], [[ids]]) for prompt, of_prompt in zip(prompts, responses, strict=True) for ids in of_prompt
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)
    hidden = model.backbone.hidden(Padded.from_lists(prompts), Padded.from_lists([[20, 21], [23, 24, 25]]))
    digits, rating = together[[0, 2], 0], together[[0, 2], 1]
    expected = model.gate(hidden[:, 0], torch.stack([torch.sigmoid(digits), rating], dim=1))
    torch.testing.assert_close(together[[0, 2], 2], expected, atol=1e-5, rtol=0)
    together[:, 2].sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert {name.split(".")[0] for name, gradient in gradients.items() if gradient.any()} == {"gate"}
    assert min(float(weight.grad.abs().max()) for weight in model.gate.parameters()) > 1e-6


def settings(folder, **more):
    given = {"learning_rate": 3e-3, "batch_size": 8, "held_out_share": 0.2, "gate": True} | more
    return AttributeConfig(output_dir=str(folder), log_to=["none"], dtype="float32", **given)


DIGITS, VOWELS = "17 42 8", "aei ou a"


def prompt_of(number):
    """Of two kinds by turns."""
    return f"{('xxxxxxxx', 'oooooooo')[number % 2]} {number}"


def rows(count):
    """Responses of digits or of vowels to prompts of both kinds."""
    given = [(number, text) for number in range(count) for text in (DIGITS, VOWELS)]
    return [
        {
            "prompt": prompt_of(n),
            "response": text,
            "attributes": {"digits": int(text == DIGITS), "vowels": int(text == VOWELS)},
        }
        for n, text in given
    ]


def rankings(count):
    """Prompts of one kind want digits, those of the other vowels: no fixed weights are right more than half of the time."""
    return [{"prompt": prompt_of(n), "responses": [DIGITS, VOWELS], "ranks": [1 + n % 2, 2 - n % 2]} for n in range(count)]


@pytest.mark.slow
def test_what_counts_depends_on_the_prompt_also_after_loading(tmp_path, align_cache):
    trainer = AttributeTrainer("tiny-llama", rows(60), settings(tmp_path / "run", epochs=4), rankings=rankings(200))
    folder = trainer.train()
    model, loaded = load_attribute_model(str(folder), "float32")
    held_out = trainer.task.held_out
    with torch.no_grad():
        memory, disk = (
            reward_rankings(each, held_out, torch.device("cpu")) for each in (trainer.task.optimization.module, model)
        )
    torch.testing.assert_close(disk, memory, atol=1e-5, rtol=0)
    scorer = HeadScorer(model, loaded, loaded.tokenization, Accelerator(cpu=True), 4096)
    for row in rankings(204)[200:]:
        prompt = ({"role": "user", "content": row["prompt"]},)
        ids = loaded.tokenization.prompt_ids(prompt)
        said = scorer(
            [SampledResponse(prompt, ids, loaded.tokenization.response_ids(text), text) for text in row["responses"]]
        )
        assert said[0]["digits"] > 0.8 > 0.2 > said[1]["digits"]
        assert (said[0]["preference"] > said[1]["preference"]) == (row["ranks"] == [1, 2])


def test_what_a_gate_needs(tmp_path, sharpen, align_cache):
    encoder = write_encoder("bert", tmp_path / "base", sharpen)
    for model, given, ranked, says in (
        (encoder, rows(4), rankings(4), "gate: model type 'bert' has no state of a prompt alone"),
        ("tiny-llama", rows(4), (), "gate: give rankings that it can learn from"),
        ("tiny-llama", rows(4), rankings(4), "at least two attributes"),
    ):
        heads = ["digits"] if "two" in says else []
        with pytest.raises(UserError, match=says):
            AttributeTrainer(model, given, settings(tmp_path / "run", heads=heads), rankings=ranked)
    with pytest.raises(UserError, match="gate is True, but must be false with form generative"):
        settings(tmp_path / "run", form="generative")
