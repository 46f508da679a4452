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
"""Maximum response length of the race. The reward is 1 if every position is a letter."""


@dataclass
class Measurement:
    """Seconds and real tokens of each measured step of one side, and further figures."""

    seconds: list[float]
    tokens: list[int]
    figures: dict[str, float] = field(default_factory=dict)


def examples(folder: Path, work: Work) -> list[dict[str, Any]]:
    """Return the token ids (`prompt` and `responses`) of the work's examples, as tokenized by our side."""
    return [json.loads(line) for line in (folder / f"{work.name}.ids.jsonl").read_text(encoding="utf-8").splitlines()]


def letters(prompts: Sequence[object], responses: Sequence[str]) -> list[float]:
    """Return the race's rewards: number of lower-case letters divided by the maximum (start 26/264, optimum 1)."""
    return [sum("a" <= letter <= "z" for letter in response) / TOKENS for response in responses]


def finish_line(updates: list[tuple[float, float, float]]) -> Measurement:
    """Return the time until the first rollout with the target mean reward, or no time if no rollout reached it.

    `updates` has the seconds, the rollout's mean reward and the rollout's KL (nats per response) of each update.
    """
    total = 0.0
    for number, (seconds, reward, kl) in enumerate(updates, start=1):
        total += seconds
        if reward >= RACE_TARGET:
            return Measurement([total], [], {"kl": kl, "updates": number})
    return Measurement([], [], {"best_reward": max(reward for _, reward, _ in updates)})


def measure(side: str, work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    """Run a scaled work with the side's function for its stage.

    Args:
        side: `ours` or `peer`.
        work: scaled work.
        variant: `auto`, the peer's number format, or the learning rate in the race.
        folder: output folder of `benchmarks.data`.
        seed: random seed.
        scratch: empty folder for the files of the run.
    """
    # Imported here, because each side's environment lacks packages of the other side.
    module = importlib.import_module("benchmarks.ours" if side == "ours" else "benchmarks.peers")
    found: Measurement = getattr(module, work.stage)(work, variant, folder, seed, scratch)
    return found


def main() -> None:
    """Run the work, and write the measurement with the peak memory (GiB)."""
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
