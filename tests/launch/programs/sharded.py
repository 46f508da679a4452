"""A model in the shards of ZeRO-3: every role of PPO is loaded, and responses are sampled.

Usage: sharded.py roles FOLDER MODEL REWARD [CHECK], or sharded.py sampling FOLDER MODEL: each process writes what the
function returns to NAME-RANK.json.
"""

import ctypes
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from align.core.errors import UserError
from align.core.seeds import RngStream
from align.models.backbone import wrap
from align.models.folders import load_weights
from align.models.heads import LanguageModel
from align.ppo import PPOConfig
from align.ppo.actor_critic import build_actor_critic, copy_backbone
from align.reward.checkpoint import load_reward_model
from align.runtime.sharding import full_nbytes, gathered_parameters, is_sharded, local_shard, sharded_loading
from align.sampling.engines import TransformersEngine
from align.sampling.generation import SamplingParams
from align.sft import SFTConfig
from align.training.model_source import ModelSource
from align.training.run import Run
from align.training.setup import build_engine

PROMPTS = [[20, 30, 40], [50, 60, 70, 80, 90, 100], [21, 31], [51, 61, 71]]
COUNTS = (1, 3, 4)  # a process without a row, one with twice the rows of the other, as many on each
ENDS = frozenset(range(8, 80))
"""Beside the model's own end: about every fourth token ends a row."""
SEED = (0, RngStream.ROLLOUT, 1)


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


def roles(folder: Path, model: str, reward: str, check: str = "") -> dict[str, Any]:
    """Load every role of PPO: how much memory that took and, with `check`, whether the weights are the file's, or the error.

    To compare them, every process then holds whole models too.
    """
    config = PPOConfig(model=model, reward_model=[reward], critic="separate", dtype="float32")
    config.output_dir, config.report_to = str(folder / "run"), ["none"]
    torch.nn.Linear(64, 64)(torch.zeros(1, 64))  # what torch allocates at its first product
    peaks = {}
    peak = Peak()
    try:
        run = Run(config, "ppo")
        loaded = ModelSource(model).load(run)
    except UserError as error:
        return {"error": str(error)}
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
            layers = [layer for layer in part.modules() if "Layer" in type(layer).__name__]
            sizes = [sum(map(full_nbytes, layer.parameters())) for layer in layers]
            found[role] = {
                "whole": sum(map(full_nbytes, weights)),
                "own": own,
                "sharded": all(map(is_sharded, weights)),
                "layer": max([*sizes, *map(full_nbytes, weights)]),
                "weight": max(map(full_nbytes, weights)),
                "peak": peaks[role],
            }
    if check:
        whole = load_weights(loaded.base, torch.float32)
        of_reward = load_weights(reward, torch.float32)
        for role, part in held.items():
            stored = dict((of_reward if role == "reward" else whole).named_parameters())
            with gathered_parameters(part.parameters()):
                same = [torch.equal(weight, stored[name]) for name, weight in part.named_parameters()]
            found[role] |= {"equal": all(same), "weights": len(same)}
        found["shares_prompts"] = [loaded.backbone.shares_prompts, wrap(whole).shares_prompts]
    return found


def sampling_of(count: int) -> SamplingParams:
    """Twelve tokens, one row at a time where there are four: each is a pass over the layers of its own."""
    return SamplingParams(12, batch_tokens=16 if count == 4 else 1024)


def sampling(folder: Path, model: str) -> dict[str, Any]:
    """Sample with whole weights and layer by layer, from rows that keep the processes busy for unequal times."""
    run = Run(SFTConfig(model=model, output_dir=str(folder / "run"), report_to=["none"], dtype="float32"), "sft")
    loaded = ModelSource(model).load(run)
    loaded.tokenization.end_ids |= ENDS
    engine = build_engine(run, LanguageModel(loaded.backbone, loaded.adapter), 1)
    found: dict[str, Any] = {"printed": []}
    run.print = found["printed"].append
    for kind, free in (("whole", run.memory.free), ("layers", lambda: 1_000)):  # in a kilobyte nothing fits
        run.memory.free = free
        sampler = TransformersEngine(engine, loaded)
        found[kind] = [sampler.sample(PROMPTS[:count], sampling_of(count), SEED).ids for count in COUNTS]
    run.close()
    return found


if __name__ == "__main__":
    name, where, *words = sys.argv[1:]
    written = {"roles": roles, "sampling": sampling}[name](Path(where), *words)
    (Path(where) / f"{name}-{torch.distributed.get_rank()}.json").write_text(json.dumps(written))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
