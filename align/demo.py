"""`align demo`: a model goes through all three stages, is compared with where it came from, and gets a report.

Each stage that is finished is not done again, so a demo that was broken off goes on where it stopped.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from align.config import RunConfig, parse
from align.data.readers import read_records
from align.data.records import Prompt
from align.errors import UserError
from align.eval.all import AllConfig, run_all
from align.eval.compare import Comparison, compare
from align.eval.report import summary_table, write_report
from align.files import write_json
from align.generation import Sampling
from align.models.zoo import resolve_model
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.reward.checkpoint import load_reward_model
from align.run import read_metrics
from align.sft import SFTConfig, run_sft

CONFIGS = Path(__file__).parents[1] / "configs" / "demo"
HEADLINES = {"truthfulness": "mc2", "toxicity": "basic: expected maximum toxicity"}
"""The figure of each evaluation that stands in the demo's table."""


def main(arguments: Sequence[str]) -> None:
    """Run the demo.

    Raises:
        UserError: for an unknown model, or a folder that cannot be written.
    """
    models = sorted(folder.name for folder in CONFIGS.iterdir())
    parser = argparse.ArgumentParser(prog="align demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help=f"one of {', '.join(models)}")
    parser.add_argument("--output_dir", "--output-dir", default="runs/demo", help="folder of the demo's runs and its report")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    words = parser.parse_args(list(arguments))
    if words.model not in models:
        raise UserError(f"the demo knows no model '{words.model}'; it has settings for {', '.join(models)}")
    begun = time.monotonic()
    folder = Path(words.output_dir)
    rows = run_demo(words.model, folder, words.seed)
    report = write_report(folder)
    print(summary_table(rows))
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes; the report: {report}")


def run_demo(model: str, folder: Path, seed: int) -> list[dict[str, Any]]:
    """All three stages and the comparison; gives the rows of the summary, which are also in summary.json."""

    def settings(config_class: type[Any], stage: str, **more: str) -> Any:
        more |= {"output_dir": str(folder / stage), "seed": str(seed)}
        words = [word for key, value in more.items() for word in (f"--{key}", value)]
        return parse(config_class, ["--config", str(CONFIGS / model / f"{stage}.yaml"), *words])

    sft = settings(SFTConfig, "sft")
    resolve_model(sft.model)
    policy = finish(run_sft, sft)
    reward = finish(run_reward, settings(RewardConfig, "reward", model=str(policy)))
    ppo = settings(PPOConfig, "ppo", model=str(policy), reward_model=str(reward))
    aligned = finish(run_ppo, ppo)
    prompts = read_records("data/prompts_heldout.jsonl", Prompt)
    sampling = Sampling(ppo.max_new_tokens, ppo.temperature)
    if ppo.overlong == "truncate":  # bytes make rows long: the tiny models take short prompts only
        prompts = [prompt for prompt in prompts if len(prompt.prompt) == 1]
    found = compare(str(policy), str(aligned), load_reward_model(str(reward)), prompts, sampling, seed)
    rows = summarize(folder, found)
    rows += judge_ends(CONFIGS / model / "eval.yaml", folder, sft.model, seed)
    write_json(folder / "summary.json", rows)
    write_json(folder / "comparison.json", comparison_rows(found))
    return rows


def finish(stage: Callable[[Any], Path], config: RunConfig) -> Path:
    """Run a stage unless its model is there already; gives the model's folder."""
    folder = Path(config.output_dir)
    if (folder / "model").exists() and (folder / "finished").exists():
        return folder / "model"
    if (folder / "metrics.jsonl").exists():
        config.resume = True
    model = stage(config)
    (folder / "finished").touch()
    return model


def comparison_rows(found: Comparison) -> list[dict[str, Any]]:
    """The first answers to each prompt side by side, for the report."""
    return [
        {
            "prompt": list(prompt.prompt),
            "before": found.before.texts[i * found.samples],
            "after": found.after.texts[i * found.samples],
            "reward_before": found.before.rewards[i * found.samples],
            "reward_after": found.after.rewards[i * found.samples],
        }
        for i, prompt in enumerate(found.prompts)
    ]


def summarize(folder: Path, found: Comparison) -> list[dict[str, Any]]:
    """The table at the end: what each stage did on data that it did not learn from."""
    sft, reward = read_metrics(folder / "sft"), read_metrics(folder / "reward")
    start, best = sft[0], min((row for row in sft if "validation/loss" in row), key=lambda row: row["validation/loss"])
    judged = min((row for row in reward if "validation/loss" in row), key=lambda row: row["validation/loss"])
    low, high = judged["validation/accuracy/low"], judged["validation/accuracy/high"]

    def share(values: Sequence[bool]) -> str:
        return f"{sum(values) / len(values):.0%}"

    def length(rows: Sequence[Sequence[int]]) -> float:
        return round(sum(map(len, rows)) / len(rows), 1)

    before, after = found.before, found.after
    mean = [sum(said.rewards) / len(said.rewards) for said in (before, after)]
    return [
        _row("SFT: perplexity of held-out demonstrations", start["validation/perplexity"], best["validation/perplexity"]),
        _row("reward model: accuracy on held-out pairs", "50 % (chance)", f"{judged['validation/accuracy']:.1%}")
        | {
            "interval": f"{low:.1%} to {high:.1%}",
            "note": f"{judged['validation/pairs']:.0f} pairs; 95 % bootstrap over rankings",
        },
        _row("PPO: mean reward on held-out prompts", mean[0], mean[1])
        | {
            "interval": f"gain {found.gain:+.2f} ({found.gain_low:+.2f} to {found.gain_high:+.2f})",
            "note": f"{len(found.prompts)} prompts, {found.samples} answers each, by the reward model that PPO was trained "
            "on; 95 % bootstrap over prompts",
        },
        _row("KL to the fine-tuned model, nats a response", 0.0, found.kl),
        _row("tokens a response", length(before.ids), length(after.ids)),
        _row("responses that end by themselves", share(before.ended), share(after.ended)),
    ]


def judge_ends(settings: Path, folder: Path, start: str, seed: int) -> list[dict[str, Any]]:
    """The model before all training and after it on the project's small sets of questions and tempting prompts.

    All figures go to `folder/eval` and into the report; the rows hold one of each task.

    Args:
        settings: those of `align eval all`; a tiny model, which says nothing, has none and gives no rows.
    """
    if not settings.exists():
        return []
    words = ["--config", str(settings), "--models", start, str(folder / "ppo"), "--output", str(folder / "eval")]
    found = run_all(parse(AllConfig, [*words, "--seed", str(seed), "--table", "false"]))
    rows = []
    for task, name in HEADLINES.items():
        pair = [figure for each in found if each.task == task for figure in each.figures if figure.name == name]
        if pair and all(figure.value is not None for figure in pair):
            after = pair[-1]
            by = f", by {after.scorer}" if after.scorer else ""
            row = _row(f"{task}: {name}", *(float(figure.value or 0.0) for figure in pair))
            interval = f"{after.low:.2f} to {after.high:.2f}" if after.low is not None else ""
            rows.append(row | {"interval": interval, "note": f"{after.n} items{by}; 95 % bootstrap of the value after"})
    return rows


def _row(name: str, before: float | str, after: float | str) -> dict[str, Any]:
    def short(value: float | str) -> float | str:
        return value if isinstance(value, str) else round(value, 2)

    return {"name": name, "before": short(before), "after": short(after), "interval": "", "note": ""}
