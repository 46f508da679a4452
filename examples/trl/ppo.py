"""PPO by a script that was written for TRL: only the import of trainer and settings differs.

    python examples/trl/ppo.py --output_dir runs/trl --total_episodes 64 --learning_rate 1e-3

The models and the prompts are made locally: a tiny Llama with random weights, and questions about colors. With your own,
give --sft_model_path and --reward_model_path, and load your data set in `data_of`. A folder with an earlier run is refused.
"""

import sys

import torch
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedTokenizerBase,
)
from trl import ModelConfig, ScriptArguments, get_peft_config

from align.model_registry.registry import resolve_model
from align.trl import PPOConfig, PPOTrainer

COLORS = ("red", "green", "blue", "white", "black", "yellow", "brown", "pink")


def data_of(tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Return prompts as token ids, split into training and test."""
    rows = [{"prompt": f"What is {color}? It is"} for color in COLORS for _ in range(4)]

    def tokenize(row: dict[str, str]) -> dict[str, object]:
        ids = tokenizer(row["prompt"], padding=False).input_ids
        return {"input_ids": ids, "lengths": len(ids)}

    data = Dataset.from_list(rows)
    mapped = data.map(tokenize, remove_columns=data.column_names)
    return mapped.filter(lambda row: row["lengths"] <= 512).train_test_split(test_size=8, seed=0)


def main(words: list[str] | None = None) -> PPOTrainer:
    """Train with the settings of the command line; return the trainer."""
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    tiny = ["--sft_model_path", str(resolve_model("tiny-llama")), "--reward_model_path", str(resolve_model("tiny-llama"))]
    given = sys.argv[1:] if words is None else words
    script_args, training_args, model_args = parser.parse_args_into_dataclasses([*tiny, *given])

    tokenizer = AutoTokenizer.from_pretrained(training_args.sft_model_path, padding_side="left")
    if tokenizer.pad_token is None:  # a new token may have no embedding, and other trainers embed padding
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    dtype = getattr(torch, model_args.dtype or "float32")
    torch.manual_seed(training_args.seed)
    value_model, reward_model = (
        AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1, dtype=dtype)
        for _ in range(2)
    )
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, dtype=dtype)
    peft_config = get_peft_config(model_args)
    reference = None
    if peft_config is None:
        reference = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, dtype=dtype)

    data = data_of(tokenizer)
    trainer = PPOTrainer(
        args=training_args,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=data[script_args.dataset_train_split],
        eval_dataset=data[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.generate_completions()
    return trainer


if __name__ == "__main__":
    main()
