"""One measured run in a process of its own: `python -m benchmarks.side ours ppo --folder F --result FILE`."""

import argparse
import importlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from benchmarks.measuring import peak_gib
from benchmarks.workloads import ALL, SCALES, Work, scaled


def module_of(side: str, work: Work) -> str:
    """The module that does the work. Imported late: a peer's environment lacks what the other sides import."""
    return "benchmarks.ours" if side == "ours" else f"benchmarks.peer_{work.peer_environment}"


def main() -> None:
    """Do the work and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("ours", "peer"))
    parser.add_argument("work", choices=ALL)
    parser.add_argument("--variant", default="auto")
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", type=Path, required=True)
    words = parser.parse_args()
    work = scaled(ALL[words.work], SCALES[words.scale])
    module, scratch = importlib.import_module(module_of(words.side, work)), words.result.parent
    found = module.measure(work, words.variant, words.folder, words.seed, scratch)
    if os.environ.get("RANK", "0") != "0":
        return
    import torch

    line = asdict(found) | {"peak_gib": round(peak_gib(), 3)}
    if torch.cuda.is_available():
        line["peak_device_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    words.result.write_text(json.dumps(line), encoding="utf-8")


if __name__ == "__main__":
    main()
