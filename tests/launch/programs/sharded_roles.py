"""Loads every role of PPO under ZeRO-3, and writes how much memory that took and whether the weights are the file's.

Usage: sharded_roles.py MODEL REWARD FOLDER [CHECK]: each process writes `RANK.json`, or the error. With CHECK, what was
loaded is compared with whole models, which every process then holds too.
"""

import ctypes
import json
import sys
import threading
import time
from pathlib import Path

import torch

from align.core.errors import UserError
from align.models.backbone import wrap
from align.models.weights import load_weights
from align.ppo import PPOConfig
from align.ppo.actor_critic import build_actor_critic, copy_backbone
from align.reward.checkpoint import load_reward_model
from align.runtime.gathering import gathered_parameters
from align.runtime.sharding import full_nbytes, is_sharded, local_shard, sharded_loading
from align.training.model_source import ModelSource
from align.training.run import Run


def own_memory() -> int:
    """Bytes that are this process's alone: not the pages of files, which the system drops when it needs room."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Peak:
    """The most memory that this process had while a thread looked, every millisecond."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        self.start = self.most = own_memory()
        self.looks = True
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while self.looks:
            self.most = max(self.most, own_memory())
            time.sleep(0.001)

    def end(self) -> int:
        self.looks = False
        self.thread.join()
        return self.most - self.start


model, reward, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
config = PPOConfig(model=model, reward_model=[reward], critic="separate", dtype="float32")
config.output_dir, config.report_to = str(folder / "run"), ["none"]
run_of_nothing = torch.nn.Linear(64, 64)(torch.zeros(1, 64))  # what torch allocates at its first product
peaks = {}
peak = Peak()
try:
    run = Run(config, "ppo")
    loaded = ModelSource(model).load(run)
except UserError as error:
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps({"error": str(error)}))
    sys.exit()
peaks["policy"] = peak.end()
held = {"policy": loaded.backbone.model}
with sharded_loading(run.accelerator):
    peak = Peak()
    held["reference"] = copy_backbone(loaded.backbone).model
    peaks["reference"] = peak.end()
    peak = Peak()
    held["reward"] = load_reward_model(reward, "float32").model.backbone.model
    peaks["reward"] = peak.end()
    peak = Peak()
    module = build_actor_critic(loaded, config.critic)
    held["critic"] = module.critic.model
    peaks["critic"] = peak.end()
    found = {}
    for role, part in held.items():
        weights = list(part.parameters())
        own = sum(local_shard(weight).numel() * weight.element_size() for weight in weights)
        layers = [sum(map(full_nbytes, layer.parameters())) for layer in part.modules() if "Layer" in type(layer).__name__]
        found[role] = {
            "whole": sum(map(full_nbytes, weights)),
            "own": own,
            "sharded": all(map(is_sharded, weights)),
            "layer": max([*layers, *map(full_nbytes, weights)]),
            "weight": max(map(full_nbytes, weights)),
            "peak": peaks[role],
        }
if len(sys.argv) > 4:
    whole = load_weights(loaded.base, torch.float32)
    of_reward = load_weights(reward, torch.float32)
    for role, part in held.items():
        stored = dict((of_reward if role == "reward" else whole).named_parameters())
        with gathered_parameters(part.parameters()):
            same = [torch.equal(weight, stored[name]) for name, weight in part.named_parameters()]
        found[role] |= {"equal": all(same), "weights": len(same)}
    found["shares_prompts"] = [loaded.backbone.shares_prompts, wrap(whole).shares_prompts]
(folder / f"{run.accelerator.process_index}.json").write_text(json.dumps(found))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
