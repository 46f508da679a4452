"""One measured run in a separate process, and what both sides need for it; plain Python, for each side's environment.

python -m benchmarks.measuring ours ppo --folder FOLDER --result FILE
"""

import argparse
import importlib
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workloads import ALL, RACE_TARGET, SCALES, Work, scaled

TOKENS = 16
"""Longest response of the race: with a letter in each of its places the reward is 1."""


@dataclass
class Measurement:
    """The seconds of each step under the clock of one side, the real tokens that it read or sampled, and further figures."""

    seconds: list[float]
    tokens: list[int]
    figures: dict[str, float] = field(default_factory=dict)


def examples(folder: Path, work: Work) -> list[dict[str, Any]]:
    """Token ids of the work's examples, `prompt` and `responses`, as our side tokenizes its texts."""
    return [json.loads(line) for line in (folder / f"{work.name}.ids.jsonl").read_text(encoding="utf-8").splitlines()]


def letters(prompts: Sequence[object], responses: Sequence[str]) -> list[float]:
    """The race's reward: lower-case letters in a response over the most there could be (start 26/264, optimum 1)."""
    return [sum("a" <= letter <= "z" for letter in response) / TOKENS for response in responses]


def finish_line(updates: list[tuple[float, float, float]]) -> Measurement:
    """When the race was won: at the first rollout whose mean reward is at the target; no seconds if none was.

    Of each update, `updates` has the seconds, the mean reward of its rollout, and the rollout's KL (nats per response).
    """
    total = 0.0
    for number, (seconds, reward, kl) in enumerate(updates, start=1):
        total += seconds
        if reward >= RACE_TARGET:
            return Measurement([total], [], {"kl": kl, "updates": number})
    return Measurement([], [], {"best_reward": max(reward for _, reward, _ in updates)})


def measure(side: str, work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    """Do the work, which is already scaled, by the side's function for its stage.

    Args:
        variant: `auto`, the peer's number format, or the learning rate in the race.
        folder: what `benchmarks.data` has made.
        scratch: an empty folder for what the run writes.
    """
    # Imported late: each side's environment lacks what the other side imports.
    module = importlib.import_module("benchmarks.ours" if side == "ours" else "benchmarks.peers")
    found: Measurement = getattr(module, work.stage)(work, variant, folder, seed, scratch)
    return found


def main() -> None:
    """Do the work and write the measurement with the peak of memory (GiB)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("ours", "peer"))
    parser.add_argument("work", choices=ALL)
    parser.add_argument("--variant", default="auto")
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", type=Path, required=True)
    words = parser.parse_args()
    work = scaled(ALL[words.work], SCALES[words.scale])
    found = measure(words.side, work, words.variant, words.folder, words.seed, words.result.parent)
    import torch

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = asdict(found) | {"peak_gib": round(peak / 2 ** (30 if sys.platform == "darwin" else 20), 3)}  # bytes, or KiB
    if torch.cuda.is_available():
        line["peak_device_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    words.result.write_text(json.dumps(line), encoding="utf-8")


if __name__ == "__main__":
    main()
