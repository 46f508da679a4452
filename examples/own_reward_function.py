"""PPO against a reward function of your own, on a transformers model and prompts that are in memory.

    python examples/own_reward_function.py [MODEL]

MODEL is a folder, a hub name or a built-in model (`align model list`); the default is a tiny random one, which learns in
half a minute on a laptop. Its answers are noise; what rises is the share of the letter e.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from align.model_registry.registry import resolve_model
from align.ppo import PPOConfig, PPOTrainer
from align.training.run_folder import read_metrics


def share_of_e(prompts, responses):
    """One score for each response: the share of the letter e."""
    return [response.count("e") / max(1, len(response)) for response in responses]


def main(model_name: str = "tiny-llama", output_dir: str = "runs/examples/own-reward", updates: int = 30) -> list[float]:
    """Train and return the mean reward of every update."""
    folder = resolve_model(model_name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = PPOConfig(
        output_dir=output_dir,
        total_updates=updates,
        rollout_batch_size=64,
        max_new_tokens=16,
        learning_rate=3e-3,
        kl_coef=0.01,
        missing_eos_score=None,
        report_to=["none"],
    )
    prompts = ["Name a tree.", "What is in the sea?", "Say hello."]
    trainer = PPOTrainer(model, [share_of_e], prompts, config, tokenizer=tokenizer)
    policy = trainer.train()
    rewards = [row["reward/share_of_e"] for row in read_metrics(trainer.run.folder)]
    print(f"mean reward {rewards[0]:.3f} -> {rewards[-1]:.3f}; the policy is in {policy}")
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:2])
