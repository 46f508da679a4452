"""The stage of reward modeling on encoders, and PPO with what it makes beside a policy with another tokenizer."""

import json
import shutil
from math import log

import pytest
import torch
from accelerate import Accelerator
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from align.core.errors import UserError
from align.eval.truthfulness.judge import load_judge, read_labeled_answers, split_by_question
from align.eval.truthfulness.train_judge import JudgeConfig, held_out_figures, run_train_judge
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.sft import SFTConfig, run_sft
from tests.models.encoders import CONFIGS, write_encoder

COMMON = {"dtype": "float32", "log_to": ["none"], "max_prompt_tokens": 100}
CASES = [(family, rank) for family in CONFIGS for rank in (0, 4)]
DOUBLED = [case for case in CASES if case not in (("bert", 0), ("deberta-v2", 4))]


def write_rankings(path):
    """Responses with many vowels are better: a tiny model learns it in a few updates."""
    prompts = ("Hi", "What is it?", "Tell me more", "Why?")
    rows = [
        {"prompt": prompt, "chosen": "aeiou aeiou" + end, "rejected": "zxcvb" + end} for prompt in prompts for end in " ,."
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path), rows


def logit(probability):
    return log(probability / (1 - probability))


def last_row(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("family", "rank"), [pytest.param(*case, marks=[pytest.mark.full] * (case in DOUBLED)) for case in CASES]
)
def test_an_encoder_learns_is_reloaded_by_transformers_and_rewards_a_policy(family, rank, sharpen, tmp_path):
    base = write_encoder(family, tmp_path / "base", sharpen)
    data, rows = write_rankings(tmp_path / "pairs.jsonl")
    settings = {"model": base, "lora_rank": rank, "learning_rate": 3e-3 if rank else 1e-3, "seed": 2}
    folder = run_reward(
        RewardConfig(
            **COMMON,
            **settings,
            train_data=data,
            validation_data=data,
            output_dir=str(tmp_path / "reward"),
            epochs=6,
            batch_size=6,
        )
    )
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

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    run_ppo(
        PPOConfig(
            **COMMON,
            model="tiny-gpt2",
            reward_model=str(folder),
            prompts=str(prompts),
            output_dir=str(tmp_path / "ppo"),
            updates=1,
            rollout_size=4,
            minibatches=1,
            max_new_tokens=6,
        )
    )
    assert last_row(tmp_path / "ppo")["reward/model"] != 0.0


def test_an_encoder_is_refused_as_a_policy_by_the_stages(sharpen, tmp_path):
    base = write_encoder("bert", tmp_path / "base", sharpen)
    words = r"^model '.*base': model type 'bert' reads text in both directions .* not a language model; choose a decoder"
    with pytest.raises(UserError, match=words):
        run_sft(SFTConfig(model=base, output_dir=str(tmp_path / "sft")))
    with pytest.raises(UserError, match=words):
        run_ppo(PPOConfig(model=base, reward_functions=["align.ppo.toy_rewards:brevity"], output_dir=str(tmp_path / "ppo")))


JUDGES = [(family, way) for family in CONFIGS for way in ("frozen", "full", "LoRA")]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(*case, marks=[pytest.mark.full] * (case not in (("roberta", "frozen"), ("bert", "full"))))
        for case in JUDGES
    ],
)
def test_an_encoder_judges_answers(family, way, sharpen, tmp_path):
    """What is saved says what was measured: on a frozen encoder, on one of which all weights learned, and with LoRA."""
    base = write_encoder(family, tmp_path / "base", sharpen)
    rows = [
        {"question": f"Question {number}?", "answer": "aeiou aeiou" if number % 2 else "zxcvb", "label": number % 2 == 1}
        for number in range(40)
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = JudgeConfig(
        model=base,
        data=str(tmp_path / "answers.jsonl"),
        output_dir=str(tmp_path / "judge"),
        words=False,
        dtype="float32",
        lora_rank=4 if way == "LoRA" else 0,
        train_backbone=way == "full",
        learning_rate=1e-3 if way == "full" else 0.01,
        held_out=0.3,
    )
    folder = run_train_judge(config)
    figures = json.loads((folder / "judge.json").read_text())["figures"]
    assert figures["auc"] > 0.9
    if way == "full":  # the base is not needed any more
        shutil.rmtree(base)
    judge = load_judge(str(folder), "truth", Accelerator(cpu=True))
    held_out = split_by_question(read_labeled_answers(config.data, "truth"), 0.3, config.seed)[1]
    found = judge.probabilities([(row.question, row.answer) for row in held_out], 999, Accelerator(cpu=True))
    assert held_out_figures([logit(p) for p in found], held_out)["loss"] == pytest.approx(figures["loss"], abs=1e-4)
