"""TRL's RewardTrainer on the pairs of the study of reward models: the ids, the batch and the schedule are ours.

Settings as in `benchmarks.peer_supervised`: those that were fastest and do the same work. Padding is our
tokenizer's, a token that no text holds: if it were the one that ends a response, `transformers` would read before that.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import RewardConfig as TrlConfig
from trl import RewardTrainer

from align.batches.encoding import encode_rankings
from align.examples import EncodedRanking
from align.models.loading import load
from align.reward import RewardConfig
from align.runtime.distributed import compute_dtype
from benchmarks.peer_supervised import Clock, trainer_settings
from benchmarks.studies.preference_data import Part

MICRO_PAIRS = 4


def train(part: Part, config: RewardConfig) -> dict[str, Any]:
    """Train once; seconds from the first step's beginning to the last one's end, and the rewards of the held-out pairs."""
    folder = Path(config.output_dir)
    start = folder / "start"
    loaded = load(config, torch.float32)
    rankings, held_out = (
        encode_rankings(str(path), loaded=loaded, limits=config.limits, skip_bad_rows=False)
        for path in (part.train, part.held_out)
    )
    loaded.backbone.model.save_pretrained(start)
    loaded.tokenization.tokenizer.save_pretrained(start)
    del loaded
    set_seed(config.seed)
    model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1, dtype=torch.float32)
    precision = str(compute_dtype(config.dtype)).removeprefix("torch.")
    updates = -(-len(rankings) // config.batch_size)
    arguments = trainer_settings(precision, config.seed, folder) | {
        "learning_rate": config.learning_rate,
        "warmup_steps": round(config.warmup * updates),
        "lr_scheduler_type": config.schedule,
        "num_train_epochs": 1,
        "per_device_train_batch_size": MICRO_PAIRS,
        "gradient_accumulation_steps": config.batch_size // MICRO_PAIRS,
    }
    clock = Clock()
    RewardTrainer(
        model=model,
        args=TrlConfig(**arguments),
        train_dataset=Dataset.from_list(list(map(preference, rankings))),
        processing_class=AutoTokenizer.from_pretrained(start),
        callbacks=[clock],
    ).train()
    began = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        rewards = score(model, held_out)
    return {
        "seconds": clock.times[-1] - clock.times[0],
        "seconds_scoring": time.perf_counter() - began,
        "tokens": clock.tokens[-1],
        "updates": len(clock.times) - 1,
        "held_out": [
            {"ranks": row.ranks, "rewards": values, "lengths": list(map(len, row.responses))}
            for row, values in zip(held_out, rewards, strict=True)
        ],
    }


def preference(ranking: EncodedRanking) -> dict[str, list[int]]:
    """A pair as TRL reads it."""
    better = ranking.ranks.index(1)
    chosen, rejected = (list(ranking.prompt) + list(ranking.responses[place]) for place in (better, 1 - better))
    return {"chosen_ids": chosen, "rejected_ids": rejected}


@torch.no_grad()
def score(model: Any, rankings: list[EncodedRanking], rows: int = 16) -> list[list[float]]:
    """The rewards of each ranking's responses."""
    model.eval()
    texts = [list(item.prompt) + list(response) for item in rankings for response in item.responses]
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found: dict[int, float] = {}
    for begin in range(0, len(order), rows):
        places = order[begin : begin + rows]
        longest = len(texts[places[-1]])
        padding = model.config.pad_token_id
        ids = torch.tensor([texts[place] + [padding] * (longest - len(texts[place])) for place in places])
        mask = torch.tensor([[1] * len(texts[place]) + [0] * (longest - len(texts[place])) for place in places])
        rewards = model(input_ids=ids, attention_mask=mask).logits[:, 0]
        found |= dict(zip(places, rewards.tolist(), strict=True))
    values = (found[place] for place in range(len(texts)))
    return [[next(values) for _ in item.responses] for item in rankings]
