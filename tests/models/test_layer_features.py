"""Which layers a head reads: by hand, for every kind of backbone, and saved with what was learned of them."""

import json

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModel, AutoModelForCausalLM

from align.batches.encoding import encode_rankings
from align.batches.limits import Limits
from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.eval.judging.answer_judge import load_judge
from align.eval.judging.train_judge import JudgeConfig, run_train_judge
from align.models.backbone import wrap
from align.models.backbone.layers import LayerFeatures
from align.models.loading import load
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.reward.checkpoint import load_reward_model
from align.reward.rankings import reward_rankings
from tests.models.architectures import make_model
from tests.models.encoders import CONFIGS, write_encoder

COMMON = {"dtype": "float32", "log_to": ["none"], "max_prompt_tokens": 100}
PROMPT, RESPONSE = Padded.from_lists([[2, 5, 6, 1], [2, 9, 1]]), Padded.from_lists([[20, 21, 1], [22, 23, 24, 25, 1]])


def test_a_mix_by_hand():
    """Shares 1/4, 1/4, 1/2 of 4, 8, 2 are 1 + 2 + 1 = 4, doubled by gamma; at the start, the mean."""
    states = [torch.tensor([[number]]) for number in (4.0, 8.0, 2.0)]
    mix = LayerFeatures("mix", 2)
    assert mix(states).tolist() == [[pytest.approx(14 / 3)]]
    with torch.no_grad():
        mix.weights.copy_(torch.tensor([1.0, 1.0, 2.0]).log())
        mix.gamma.fill_(2.0)
    assert mix(states).tolist() == [[pytest.approx(8.0)]]
    mix(states).sum().backward()
    # d/dw_j = gamma s_j (h_j - sum s h): 2 x 1/4 x (4 - 4), 2 x 1/4 x (8 - 4), 2 x 1/2 x (2 - 4)
    assert mix.weights.grad.tolist() == pytest.approx([0.0, 2.0, -2.0])
    assert mix.gamma.grad.tolist() == pytest.approx([4.0])


def test_the_last_four_are_joined_in_their_order():
    states = [torch.full((1, 2), float(number)) for number in range(6)]
    assert LayerFeatures("last_four", 5)(states).tolist() == [[2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0]]


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
    mixed.read_layers("mix")
    assert mixed.feature_size == plain.feature_size
    even = mixed.features(PROMPT, RESPONSE)
    assert (even - last).abs().max() > 0.01
    mixed.layers.weights[-1] = 100.0
    torch.testing.assert_close(mixed.features(PROMPT, RESPONSE), last, atol=1e-5, rtol=0)
    layers = len(mixed.layers.weights) - 1
    if layers < 4:
        with pytest.raises(UserError, match=f"^read_layers is last_four, but the model has {layers} layers"):
            joined.read_layers("last_four")
        return
    joined.read_layers("last_four")
    found = joined.features(PROMPT, RESPONSE)
    width = joined.feature_size // 2
    assert found.shape == (2, 2 * width)
    size = width // 4
    mean_and_last = torch.cat([found[:, width - size : width], found[:, -size:]], dim=1)
    torch.testing.assert_close(mean_and_last, last, atol=1e-5, rtol=0)
    alone = joined.summary(PROMPT.rows([1]), RESPONSE.rows([1]))
    torch.testing.assert_close(joined.summary(PROMPT, RESPONSE)[1:], alone, atol=1e-5, rtol=0)


def test_states_of_two_widths_are_not_mixed():
    with pytest.raises(UserError, match="the model projects its last states to another width; choose last"):
        wrap(make_model("OPT, norms behind")).read_layers("mix")


# ----------------------------------------------------------------------------------------------------------------- stages


def pairs(path):
    prompts = ("Hi", "What is it?", "Tell me more", "Why?")
    rows = [
        {"prompt": prompt, "chosen": "aeiou aeiou" + end, "rejected": "zxcvb" + end} for prompt in prompts for end in " ,."
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


CASES = [("bert", "mix", 0), ("bert", "last_four", 4), ("tiny-llama", "mix", 4)]
FULL = [("xlnet", "last_four", 0), ("albert", "mix", 4), ("tiny-t5", "mix", 0), ("modernbert", "last_four", 0)]


@pytest.mark.parametrize(
    ("name", "choice", "rank"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)]
)
def test_a_reward_model_keeps_its_layers_and_rewards_a_policy(name, choice, rank, sharpen, tmp_path):
    base = name if name.startswith("tiny") else write_encoder(name, tmp_path / "base", sharpen, layers=4)
    data, settings = pairs(tmp_path / "pairs.jsonl"), {"lora_rank": rank, "epochs": 2, "batch_size": 6}
    settings |= {"learning_rate": 3e-3, "train_data": data, "validation_data": data}
    config = RewardConfig(**COMMON, **settings, model=base, output_dir=str(tmp_path / "reward"), read_layers=choice)
    folder = run_reward(config)
    again = load_reward_model(str(folder), "float32")
    assert again.model.backbone.layers.choice == choice
    if choice == "mix":
        weights = again.model.backbone.layers.weights
        assert weights.abs().min() > 1e-5  # learned
    stored = json.loads((tmp_path / "reward" / "validation.json").read_text())
    with torch.no_grad():
        rankings = encode_rankings(data, again.loaded, Limits(100, 100), False)
        scores = reward_rankings(again.model, rankings, torch.device("cpu")).tolist()
    assert scores == pytest.approx([reward for row in stored for reward in row["rewards"]], abs=1e-4)
    # Transformers finds the model that is under the head, and no classifier that would score otherwise.
    if rank == 0:
        auto = AutoModel if name in CONFIGS else AutoModelForCausalLM if name != "tiny-t5" else None
        if auto:
            assert "SequenceClassification" not in type(auto.from_pretrained(folder)).__name__
        assert "score" not in json.loads((folder / "config.json").read_text())["architectures"][0].lower()
    # Training goes on from it without the setting, and refuses another one.
    settings |= {"model": str(folder), "epochs": 1, "output_dir": str(tmp_path / "further")}
    further = run_reward(RewardConfig(**COMMON, **settings))
    assert load_reward_model(str(further), "float32").model.backbone.layers.choice == choice
    other = "mix" if choice == "last_four" else "last_four"
    with pytest.raises(UserError, match=f"^read_layers is {other}, but the head of reward model '.*' reads {choice}$"):
        run_reward(RewardConfig(**COMMON, **settings | {"output_dir": str(tmp_path / "other")}, read_layers=other))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi", "Why?")))
    ppo = {"rollout_size": 4, "minibatches": 1, "updates": 1, "max_new_tokens": 6, "prompts": str(prompts)}
    ppo |= {"model": "tiny-llama", "lora_rank": rank, "reward_model": str(folder), "critic": "separate"}
    run_ppo(PPOConfig(**COMMON, **ppo, output_dir=str(tmp_path / "ppo")))
    (row,) = [json.loads(line) for line in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert row["reward/model"] != 0.0


def test_a_classifier_or_a_language_model_loss_reads_the_last_layer(tmp_path):
    data = pairs(tmp_path / "pairs.jsonl")
    settings = {"model": "tiny-llama", "train_data": data, "batch_size": 6}
    folder = run_reward(RewardConfig(**COMMON, **settings, output_dir=str(tmp_path / "reward")))
    with pytest.raises(UserError, match=r"^read_layers is mix, but the head of reward model '.*' reads last$"):
        run_reward(
            RewardConfig(**COMMON, **settings | {"model": str(folder)}, output_dir=str(tmp_path / "a"), read_layers="mix")
        )
    (folder / "reward.json").unlink()  # as another library would have saved it
    with pytest.raises(UserError, match=r"its last layer; start from a language model$"):
        run_reward(
            RewardConfig(**COMMON, **settings | {"model": str(folder)}, output_dir=str(tmp_path / "b"), read_layers="mix")
        )
    with pytest.raises(UserError, match=r"^lm_loss_weight: tokens are predicted from the last layer; set it to 0"):
        run_reward(RewardConfig(**COMMON, **settings, output_dir=str(tmp_path / "c"), read_layers="mix", lm_loss_weight=0.5))


@pytest.mark.parametrize(
    ("choice", "trained"),
    [*(pytest.param(choice, False, marks=pytest.mark.full) for choice in ("last_four", "mix")), ("mix", True)],
)
def test_a_judge_keeps_its_layers(choice, trained, sharpen, tmp_path):
    base = write_encoder("bert", tmp_path / "base", sharpen, layers=4)
    rows = [
        {"question": f"What is {number}?", "answer": "aeiou" if number % 2 else "zxcvb", "label": number % 2 == 1}
        for number in range(40)
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"dtype": "float32", "model": base, "epochs": 12, "words": False}
    more = {"train_backbone": True, "learning_rate": 2e-3} if trained else {"learning_rate": 0.02}
    data = str(tmp_path / "answers.jsonl")
    config = JudgeConfig(**settings, data=data, output_dir=str(tmp_path / "judge"), read_layers=choice, batch_size=8, **more)
    folder = run_train_judge(config)
    judge = load_judge(str(folder), "truth", Accelerator(cpu=True))
    assert judge.model.backbone.layers.choice == choice
    if choice == "mix":
        assert judge.model.backbone.layers.weights.abs().min() > 1e-5  # learned
    yes, no = judge.probabilities([("What is 3?", "aeiou"), ("What is 4?", "zxcvb")], 999, Accelerator(cpu=True))
    assert yes > 0.8
    assert no < 0.2
