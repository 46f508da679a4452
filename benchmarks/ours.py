"""Our side of each work. It uses only public functions, and takes times from the run's metrics."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from align.models.loading import load_whole
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.runtime.distributed import compute_dtype
from align.sampling.generation import Responses, SamplingParams, row_uniforms, sample
from align.sft import SFTConfig, run_sft
from align.training.run_folder import read_metrics
from benchmarks.measuring import TOKENS, Measurement, examples, finish_line, letters
from benchmarks.workloads import LEARNING_RATE, PPO_EPOCHS, RACE_KL_BETA, RACE_UPDATES, Work


def _settings(work: Work, folder: Path, seed: int, scratch: Path) -> dict[str, Any]:
    """Return the settings shared by all stages."""
    run = {"output_dir": str(scratch / "run"), "report_to": ["none"], "seed": seed}
    return {"model": str(folder / work.model_folder), "chat_template": "raw"} | run


def ppo(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    rows = _updates(work, folder, seed, scratch, reward_model=str(folder / work.reward_folder))[work.warmup :]
    length = [row["response/length"] for row in rows]
    figures = {"response_tokens": sum(length) / len(length), "kl": rows[-1]["kl/k1"]}
    figures |= {name: _mean(rows, f"speed/{name}") for name in ("mfu", "mfu_learn")}
    figures |= {part: _mean(rows, f"time/{part}") for part in ("sample", "score", "record", "learn")}
    return Measurement([row["time/update"] for row in rows], [round(each * work.rows) for each in length], figures)


def _updates(work: Work, folder: Path, seed: int, scratch: Path, **more: Any) -> list[dict[str, float]]:
    """Run PPO and return the metrics of all updates. Settings in `more` take precedence."""
    shape = {"max_prompt_tokens": work.prompt[1], "max_new_tokens": work.response[1], "rollout_batch_size": work.rows}
    common = {"num_ppo_epochs": PPO_EPOCHS, "total_updates": work.warmup + work.measured, "learning_rate": LEARNING_RATE}
    data = {"prompts": str(folder / f"{work.name}.jsonl"), "missing_eos_score": None}
    config = PPOConfig(**_settings(work, folder, seed, scratch) | shape | common | data | work.settings | more)
    run_ppo(config)
    return read_metrics(Path(config.output_dir))


def learning(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    given = [row["responses"][0] for row in examples(folder, work)]
    engine = SimpleNamespace(weights_changed=lambda: None, close=lambda: None)
    engine.sample = lambda prompts, *_: Responses(given[: len(prompts)], [True] * len(prompts))
    with patch("align.ppo.setup.make_engine", lambda *_: engine):
        rows = _updates(work, folder, seed, scratch, reward_functions=["align.ppo.toy_rewards:share_of_e"])[work.warmup :]
    seconds = [row["time/update"] * row["time/learn"] for row in rows]
    tokens = work.rows * (work.prompt[1] + work.response[1])
    figures = {"mfu_learn": _mean(rows, "speed/mfu_learn"), "update": _mean(rows, "time/update")}
    return Measurement(seconds, [tokens] * len(rows), figures)


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def _between(run: Path, work: Work) -> Measurement:
    """Measure the steps of a supervised run by the times between lines of its metrics.

    The first and the last step are not counted, because they include loading and saving the model.
    """
    rows = [row for row in read_metrics(run) if row["update"] > 0]
    clock, chosen = [row["seconds"] for row in rows], range(work.warmup, work.warmup + work.measured)
    seconds = [clock[step] - clock[step - 1] for step in chosen]
    figures = {"first_loss": rows[0]["loss"], "last_loss": rows[-1]["loss"]}
    figures["mfu"] = _mean([rows[step] for step in chosen], "speed/mfu")
    return Measurement(seconds, [int(rows[step]["tokens/read"]) for step in chosen], figures)


def reward(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    run_reward(RewardConfig(**_supervised(work, folder, seed, scratch)))
    return _between(scratch / "run", work)


def sft(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    run_sft(SFTConfig(**_supervised(work, folder, seed, scratch)))
    return _between(scratch / "run", work)


def _supervised(work: Work, folder: Path, seed: int, scratch: Path) -> dict[str, Any]:
    data = {"train_data": str(folder / f"{work.name}.jsonl"), "batch_size": work.rows, "learning_rate": LEARNING_RATE}
    limits = {"max_prompt_tokens": work.prompt[1], "max_response_tokens": work.response[1]}
    return _settings(work, folder, seed, scratch) | data | limits | work.settings


def sampling(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    loaded = load_whole(str(folder / "model"), compute_dtype("auto"), "raw")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded.backbone.to(device).eval().requires_grad_(False)
    prompts = [row["prompt"] for row in examples(folder, work)]
    sampling = SamplingParams(work.response[1], batch_tokens=work.rows * (work.prompt[1] + work.response[1]))
    seconds, tokens = [], []
    for step in range(work.warmup + work.measured):
        uniforms = row_uniforms(work.rows, sampling, seed, step)
        begun = time.perf_counter()
        part = prompts[step * work.rows : (step + 1) * work.rows]
        found = sample(loaded.backbone, part, uniforms, sampling, loaded.tokenization.end_ids)
        seconds.append(time.perf_counter() - begun)
        tokens.append(sum(map(len, found.ids)))
    return Measurement(seconds[work.warmup :], tokens[work.warmup :])


def race(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    more = {"reward_functions": [f"{letters.__module__}:{letters.__name__}"], "max_new_tokens": TOKENS}
    more |= {"total_updates": RACE_UPDATES, "kl_coef": RACE_KL_BETA}
    more |= {"learning_rate": float(variant), "lr_scheduler_type": "constant"}
    more["dtype"] = "float32"  # a tiny model gains nothing from bfloat16, on either side
    rows = _updates(work, folder, seed, scratch, **more)
    return finish_line([(row["time/update"], row["reward/mean"], row["kl/k1"]) for row in rows])
