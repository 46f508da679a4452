"""Tiny models as TRL's scripts load them: a tokenizer with a padding token that the models have no embedding for."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from align.model_registry.registry import resolve_model
from align.trl import PPOConfig, PPOTrainer


@pytest.fixture(scope="session")
def folder():
    return str(resolve_model("tiny-llama"))


@pytest.fixture
def tokenizer(folder):
    made = AutoTokenizer.from_pretrained(folder, padding_side="left")
    made.add_special_tokens({"pad_token": "[PAD]"})
    return made


@pytest.fixture
def models(folder):
    """Policy, reference, reward model and value model, by the names of the trainer's arguments."""
    torch.manual_seed(0)
    policies = {name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for name in ("model", "ref_model")}
    scorers = {
        name: AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        for name in ("reward_model", "value_model")
    }
    return policies | scorers


@pytest.fixture
def prompts(tokenizer):
    """Token ids of 12 prompts of different lengths, each with EOS at its end."""
    ids = [[*tokenizer("Name " + "a " * number + "color").input_ids, tokenizer.eos_token_id] for number in range(12)]
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})


@pytest.fixture
def make_trainer(tokenizer, models, prompts, tmp_path):
    """`make_trainer({"stop_token": "eos"}, callbacks=[...])`: a trainer with these settings and arguments.

    `trainer`: a subclass.
    """

    def make(settings=None, trainer=PPOTrainer, **arguments):
        few = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 2, "num_ppo_epochs": 2}
        few |= {"response_length": 6, "total_episodes": 8, "report_to": "none", "num_sample_generations": 0}
        args = PPOConfig(**{"output_dir": str(tmp_path / "out")} | few | (settings or {}))
        given = {"args": args, "processing_class": tokenizer, "train_dataset": prompts, "eval_dataset": prompts}
        return trainer(**given | models | arguments)

    return make
