"""A script for TRL 0.11 with fixed responses, of which each process has a part; tests launch it with several processes."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from align.trl.legacy import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from align.trl.legacy.core import LengthSampler

QUERIES = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
RESPONSES = [[20, 21], [22, 23, 24], [25], [26, 27, 28, 29]]
SCORES = [1.0, -1.0, 0.5, 2.0]


def main(model_name: str, output: str, batch_size: int) -> None:
    """Make two steps, sample, and save statistics and model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(model_name, dtype=torch.float32)
    config = PPOConfig(batch_size=batch_size, mini_batch_size=1, gradient_accumulation_steps=batch_size, learning_rate=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    trainer = PPOTrainer(config, model, None, tokenizer)
    own = slice(trainer.accelerator.process_index * batch_size, (trainer.accelerator.process_index + 1) * batch_size)
    queries, responses = ([torch.tensor(row) for row in rows[own]] for rows in (QUERIES, RESPONSES))
    rows = []
    for _ in range(2):
        stats = trainer.step(queries, responses, [torch.tensor(score) for score in SCORES[own]])
        trainer.log_stats(stats, {}, SCORES[own])
        rows.append({name: value for name, value in stats.items() if not name.startswith("time/")})
    sampled = trainer.generate(queries, length_sampler=LengthSampler(3, 4), return_prompt=False, pad_token_id=0)
    assert all(1 <= len(response) <= 3 for response in sampled)
    trainer.save_pretrained(Path(output) / "model")
    if trainer.accelerator.is_main_process:
        (Path(output) / "stats.json").write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
