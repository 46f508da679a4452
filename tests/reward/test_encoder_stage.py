import json
from functools import partial

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from align.core.errors import UserError
from align.extras.attributes import AttributeConfig, AttributeTrainer
from align.extras.attributes.model import Head, load_attribute_model
from align.extras.rules import RuleConfig, RuleTrainer
from align.ppo import PPOConfig, PPOTrainer
from align.reward import RewardConfig, RewardTrainer
from align.reward.checkpoint import RULE, load_reward_model
from align.reward.rankings import reward_rankings
from tests.extras.rules.planted import RULES
from tests.files import read_rows
from tests.models.encoders import CONFIGS, write_encoder
from tests.settings import run_settings

COMMON = run_settings(max_prompt_tokens=160)
CASES = [(family, rank) for family in CONFIGS for rank in (0, 4)]


def cases(*always):
    """Every family with all weights and with LoRA; those that `make test` leaves out are marked."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case not in always)) for case in CASES]


def settings(folder, rank):
    given = {"learning_rate": 3e-3 if rank else 1e-3, "lora_r": rank, "num_train_epochs": 6, "batch_size": 6, "seed": 2}
    # One evaluation, at the end: the best model is then the last one.
    return COMMON | given | {"output_dir": str(folder), "validation_split": 0.25, "eval_steps": 1000}


def texts(count):
    """Prompts with responses that are all vowels, or have none, by turns."""
    return [(f"Hi {number}", "aeiou aei" if number % 2 else "zxcvb bcd", number % 2) for number in range(count)]


def assert_the_loss_of_single_rows_adds_up(loss_of, batch):
    """What is learned from rows does not depend on which are read together."""
    with torch.no_grad():
        together, alone = float(loss_of(batch, batch)[0]), [float(loss_of([row], batch)[0]) for row in batch]
    assert max(alone) > 1e-3
    assert sum(alone) == pytest.approx(together, abs=1e-5)


def assert_the_same_scores(memory, disk, examples):
    """Of a model in memory and the same from disk."""
    with torch.no_grad():
        found, again = (reward_rankings(model, examples, torch.device("cpu")) for model in (memory, disk))
    assert float(found.std()) > 0.01
    torch.testing.assert_close(again, found, atol=1e-5, rtol=0)
    return found


def last_row(folder):
    return read_rows(folder / "metrics.jsonl")[-1]


def metrics_of_ppo(folder, reward, **judge):
    """Of an update of a GPT-2, which reads other token ids than the judge."""
    config = PPOConfig(
        **COMMON,
        **judge,
        output_dir=str(folder),
        total_updates=1,
        rollout_batch_size=4,
        num_mini_batches=1,
        max_new_tokens=6,
    )
    PPOTrainer("tiny-gpt2", reward, ["Hi", "Why?"], config).train()
    return last_row(folder)


@pytest.mark.parametrize(("family", "rank"), cases(("bert", 0)))
def test_an_encoder_learns_is_reloaded_by_transformers_and_rewards_a_policy(family, rank, sharpen, tmp_path):
    """Responses with many vowels are better: a tiny model learns it in a few updates."""
    prompts = ("Hi", "What is it?", "Tell me more", "Why?")
    rows = [
        {"prompt": prompt, "chosen": "aeiou aeiou" + end, "rejected": "zxcvb" + end} for prompt in prompts for end in " ,."
    ]
    base = write_encoder(family, tmp_path / "base", sharpen)
    config = settings(tmp_path / "reward", rank)
    del config["validation_split"]
    folder = RewardTrainer(base, rows, RewardConfig(**config), rows).train()
    assert last_row(tmp_path / "reward")["validation/accuracy"] > 0.9
    tokenizer = AutoTokenizer.from_pretrained(folder)
    auto = AutoPeftModelForSequenceClassification if rank else AutoModelForSequenceClassification
    classifier = auto.from_pretrained(folder, num_labels=1).eval()
    pairs = [[row["prompt"] for row in rows] * 2, [row[kind] for kind in ("chosen", "rejected") for row in rows]]
    with torch.no_grad():
        scores = classifier(**tokenizer(*pairs, padding=True, return_tensors="pt")).logits[:, 0]
    stored = json.loads((tmp_path / "reward" / "validation.json").read_text())
    found = [row["rewards"][kind] for kind in (0, 1) for row in stored]
    assert scores.tolist() == pytest.approx(found, abs=1e-4)
    assert metrics_of_ppo(tmp_path / "ppo", [str(folder)])["reward/model"] != 0.0


@pytest.mark.parametrize(("family", "rank"), cases(("albert", 4)))
def test_an_encoder_rates_attributes_and_is_a_reward(family, rank, sharpen, tmp_path):
    rows = [
        {"prompt": prompt, "response": response, "attributes": {"vowels": vowels, "length": len(response) % 7 + 1}}
        for prompt, response, vowels in texts(48)
    ]
    base = write_encoder(family, tmp_path / "base", sharpen)
    trainer = AttributeTrainer(base, rows, AttributeConfig(**settings(tmp_path / "run", rank)))
    loss_of = partial(trainer.form.batch_loss, trainer.engine.module, torch.device("cpu"))
    assert_the_loss_of_single_rows_adds_up(loss_of, trainer.order.examples[:3])
    folder = trainer.train()
    assert last_row(tmp_path / "run")["validation/head/vowels/auc"] > 0.9
    model, _ = load_attribute_model(str(folder), "float32")
    assert model.heads == [Head("length", "scale"), Head("vowels", "binary")]
    assert_the_same_scores(trainer.engine.module, model, trainer.held_out)
    found = metrics_of_ppo(tmp_path / "ppo", [], attributes={"model": str(folder), "reward": "length-vowels"})
    assert 0 < found["reward/attributes"] < 7


@pytest.mark.parametrize(("family", "rank"), cases(("distilbert", 0)))
def test_an_encoder_judges_by_rules_and_is_obeyed(family, rank, sharpen, tmp_path):
    rows = [
        {"prompt": prompt, "response": response, "rule": "no-digits", "verdict": "violates" if vowels else "follows"}
        for prompt, response, vowels in texts(48)
    ]
    base = write_encoder(family, tmp_path / "base", sharpen)
    trainer = RuleTrainer(base, rows, RuleConfig(**settings(tmp_path / "run", rank), rules=RULES))
    loss_of = partial(trainer.form.batch_loss, trainer.engine.module, torch.device("cpu"))
    assert_the_loss_of_single_rows_adds_up(loss_of, trainer.order.examples[:3])
    folder = trainer.train()
    assert last_row(tmp_path / "run")["validation/auc"] > 0.9
    model = load_reward_model(str(folder), "float32", kind=RULE).model
    assert_the_same_scores(trainer.engine.module, model, trainer.held_out)
    found = metrics_of_ppo(tmp_path / "ppo", [lambda prompts, given: [0.0] * len(given)], rules={"model": str(folder)})
    assert 0 < found["reward/rule/no-digits"] < 1


def test_an_encoder_cannot_write_ratings(sharpen, tmp_path):
    base = write_encoder("bert", tmp_path / "base", sharpen)
    config = AttributeConfig(**COMMON, output_dir=str(tmp_path / "run"), form="generative")
    rows = [{"prompt": "Hi", "response": "Ho", "attributes": {"kind": 1}}]
    with pytest.raises(
        UserError, match=r"^model '.*base': model type 'bert' reads text in both directions .*judge, not a"
    ) as caught:
        AttributeTrainer(base, rows, config)
    assert "\n" not in str(caught.value)
