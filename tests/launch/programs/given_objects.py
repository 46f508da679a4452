"""PPO with models, an optimizer and callbacks in memory, alone or in the processes that a launcher started.

Usage: given_objects.py FOLDER; each process writes what its callbacks saw to RANK.json there. See test_two_processes.py.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from align.model_registry.registry import resolve_model
from align.ppo import PPOConfig, PPOTrainer

RANK, folder = int(os.environ.get("RANK", "0")), Path(sys.argv[1])
LAST = int(os.environ.get("WORLD_SIZE", "1")) - 1
source = resolve_model("tiny-llama")


class Wishes(TrainerCallback):
    """On the last process alone: wants a checkpoint after update 2, and the end after update 3."""

    def __init__(self):
        self.events = []

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(state.global_step)
        control.should_save = RANK == LAST and state.global_step == 2
        control.should_training_stop = RANK == LAST and state.global_step == 3

    def on_save(self, args, state, control, **kwargs):
        self.events.append("save")

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")


def classifier(seed):
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)


def moved(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    return model


policy, value_model = (
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
    classifier(RANK),
)  # another head each
optimizer = torch.optim.AdamW([*policy.parameters(), *value_model.parameters()], lr=1e-3, weight_decay=0.0)
wishes = Wishes()
config = PPOConfig(
    output_dir=str(folder / "run"),
    dtype="float32",
    report_to=["none"],
    total_updates=5,
    rollout_batch_size=4,
    num_ppo_epochs=1,
    max_new_tokens=4,
    missing_eos_score=None,
    collective_timeout=60,
)
trainer = PPOTrainer(
    policy,
    [classifier(7)],
    ["red", "green, blue", "one"],
    config,
    tokenizer=AutoTokenizer.from_pretrained(source),
    reference=moved(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)),
    value_model=value_model,
    optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2)),
    callbacks=[wishes],
)
trainer.train()
head = value_model.score.weight.detach()[0, :4].tolist()
(folder / f"{RANK}.json").write_text(json.dumps({"events": wishes.events, "head": head}))
