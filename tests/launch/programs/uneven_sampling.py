"""Samples under ZeRO-3 with whole weights and layer by layer, from rows that keep the processes busy for unequal times.

Usage: uneven_sampling.py MODEL FOLDER: the first process writes `sampled.json`, responses by the kind of gathering.
"""

import json
import sys
from pathlib import Path

import torch

from align.core.seeds import RngStream
from align.models.heads import LanguageModel
from align.sampling.engines import TransformersEngine
from align.sampling.generation import SamplingParams
from align.sft import SFTConfig
from align.training.model_source import ModelSource
from align.training.run import Run
from align.training.start import build_engine

PROMPTS = [[20, 30, 40], [50, 60, 70, 80, 90, 100], [21, 31], [51, 61, 71]]
COUNTS = (1, 3, 4)  # a process without a row, one with twice the rows of the other, as many on each
ENDS = frozenset(range(8, 80))
"""Beside the model's own end: about every fourth token ends a row."""
SEED = (0, RngStream.ROLLOUT, 1)


def sampling(count: int) -> SamplingParams:
    """Twelve tokens, one row at a time where there are four: each is a pass over the layers of its own."""
    return SamplingParams(12, batch_tokens=16 if count == 4 else 1024)


if __name__ == "__main__":
    model, folder = sys.argv[1], Path(sys.argv[2])
    config = SFTConfig(model=model, output_dir=str(folder / "run"), report_to=["none"], dtype="float32")
    run = Run(config, "sft")
    loaded = ModelSource(model).load(run)
    loaded.tokenization.end_ids |= ENDS
    engine = build_engine(run, LanguageModel(loaded.backbone, loaded.adapter), 1)
    found, printed = {}, []
    run.print = printed.append
    for kind, free in (("whole", run.memory.free), ("layers", lambda: 1_000)):  # in a kilobyte nothing fits
        run.memory.free = free
        sampler = TransformersEngine(engine, loaded)
        found[kind] = [sampler.sample(PROMPTS[:count], sampling(count), SEED).ids for count in COUNTS]
    if run.is_main:
        (folder / "sampled.json").write_text(json.dumps({**found, "printed": printed}))
    run.close()
    torch.distributed.destroy_process_group()
