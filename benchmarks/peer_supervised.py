"""The peers of supervised work: TRL's RewardTrainer and SFTTrainer, and transformers' generate.

Settings are the fastest that were found and that do the same work: no gradient checkpointing (TRL's default recomputes every
forward pass), no evaluation, no saving; the optimizer is the same fused AdamW. bfloat16 is autocast over float32 weights,
which is what a Trainer's `bf16` means; weights that are themselves bfloat16 would round away updates of this size.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.measuring import Measurement, examples
from benchmarks.workloads import LEARNING_RATE, Work

ON_CPU = not torch.cuda.is_available()


def measure(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    """Do the work once; `variant` is the format that is computed in. The rest as in `ours.measure`."""
    sides: dict[str, Callable[[Work, str, Path, int, Path], Measurement]] = {
        "reward": _reward,
        "sft": _sft,
        "sampling": _sampling,
    }
    return sides[work.stage](work, variant, folder, seed, scratch)


class Clock(TrainerCallback):
    """Wall time and real tokens at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())
        self.tokens.append(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())
        self.tokens.append(int(state.num_input_tokens_seen))

    def measurement(self, work: Work) -> Measurement:
        """The steps after the warm-up, each from the end of the one before."""
        seconds = [after - before for before, after in itertools.pairwise(self.times)]
        tokens = [after - before for before, after in itertools.pairwise(self.tokens)]
        return Measurement(seconds[work.warmup :], tokens[work.warmup :])


def trainer_settings(variant: str, seed: int, scratch: Path) -> dict[str, Any]:
    """Settings that TRL's trainers share; `variant` is the format that is computed in."""
    return {
        "output_dir": str(scratch / "run"),
        "seed": seed,
        "bf16": variant == "bfloat16",
        "use_cpu": ON_CPU,
        "learning_rate": LEARNING_RATE,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "non_padding",
        "max_length": None,
        "dataloader_pin_memory": not ON_CPU,
    }


def _reward(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    """A ranking is all of its pairs, as InstructGPT's one batch element is; an update is `rows` rankings.

    With `pairs_read` the steps under the clock hold that many of the pairs, and the time is scaled to all of them: a pair
    costs what every other costs. Each step then also has an optimizer step of its own, which is taken once.
    """
    rankings, read = examples(folder, work), work.pairs_read or work.pairs
    pairs = [
        {"chosen_ids": row["prompt"] + row["responses"][i], "rejected_ids": row["prompt"] + row["responses"][j]}
        for row in rankings
        for i, j in list(itertools.combinations(range(work.responses), 2))[:read]
    ]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1, dtype=torch.float32)
    clock = Clock()
    micro = min(read, 6)  # pairs, so 12 texts at once: faster than 36 pairs, and in a sixth of the memory
    config = RewardConfig(
        **trainer_settings(variant, seed, scratch),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=work.rows * read // micro,
        max_steps=work.warmup + work.measured,
    )
    RewardTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[clock],
    ).train()
    found = clock.measurement(work)
    found.seconds = [seconds * work.pairs / read for seconds in found.seconds]
    return found


def _sft(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    rows = [
        {
            "input_ids": row["prompt"] + row["responses"][0],
            "completion_mask": [0] * len(row["prompt"]) + [1] * len(row["responses"][0]),
        }
        for row in examples(folder, work)
    ]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    clock = Clock()
    micro = min(work.rows, 4)  # fewer rows at once are padded less: faster than 8 or 16
    config = SFTConfig(
        **trainer_settings(variant, seed, scratch),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=max(1, work.rows // micro),
        max_steps=work.warmup + work.measured,
        completion_only_loss=True,
    )
    SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[clock],
    ).train()
    return clock.measurement(work)


def _sampling(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, variant)).eval()
    model = model.to("cpu" if ON_CPU else "cuda")
    prompts = torch.tensor([row["prompt"] for row in examples(folder, work)], device=model.device)
    seconds, tokens = [], []
    for step in range(work.warmup + work.measured):
        part = prompts[step * work.rows : (step + 1) * work.rows]
        begun = time.perf_counter()
        ids = model.generate(
            input_ids=part,
            attention_mask=torch.ones_like(part),
            do_sample=True,
            top_k=0,
            max_new_tokens=work.response[1],
        )
        if not ON_CPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        tokens.append(int((ids[:, part.shape[1] :] != model.config.pad_token_id).sum()))
    return Measurement(seconds[work.warmup :], tokens[work.warmup :])
