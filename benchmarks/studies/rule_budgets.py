"""Is a budget of violations reached, and kept? The study on a toy whose figures docs/rules.md quotes.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.rule_budgets [--seeds 0 1 2] [--damping 5 0] [--updates 60]

A tiny model learns to answer in words, half of its answers with a number. A rule model learns that digits violate a rule.
PPO rewards the share of known words and holds the rule to a budget, with and without damping of the multiplier. One model of
each kind a seed; a PPO run takes about a minute of one core. Runs that are finished are not done again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from align.commands.stages import run_unless_finished
from align.launch import quiet_libraries
from align.ppo import PPOConfig
from align.ppo.rollout_files import read_rollout
from align.ppo.trainer import PPOTrainer
from align.rules import RuleConfig, RuleTrainer
from align.sft import SFTConfig
from align.sft.trainer import SFTTrainer
from align.training.metrics_file import read_metrics
from tests.rules.planted import RULES, WORDS, has_digit, judgments, response

RULE = "no-digits"
BUDGET = 0.1
PROMPTS = [f"{word} {number}?" for number, word in enumerate(WORDS * 6)]
LEARNED = 60
"""How many of the prompts PPO samples from; the others are those of evaluations."""
EVERY = 5
"""Updates between evaluations, and over which shares are averaged."""
MODEL: dict[str, Any] = {"log_to": ["none"], "dtype": "float32", "learning_rate": 3e-3}


def known_words(prompts: Sequence[object], responses: Sequence[str]) -> list[float]:
    """The preference: the share of a response's words that are words of the task, or numbers."""
    rows = [text.split() for text in responses]
    return [sum(word in WORDS or word.isdigit() for word in row) / max(1, len(row)) for row in rows]


def train_models(folder: Path, seed: int) -> tuple[Path, Path]:
    """The folders of a model that writes and of one that knows the rule."""
    draw = random.Random(1 + seed)
    rows = [{"prompt": f"{draw.choice(WORDS)} {n}?", "completion": response(draw, n % 2 == 0)} for n in range(320)]
    writes = SFTConfig(**MODEL, output_dir=str(folder / "sft"), epochs=6, batch_size=16, seed=seed)
    writer = run_unless_finished(lambda config: SFTTrainer("tiny-llama", rows, config).train(), writes)
    judged, given = judgments(200, seed), MODEL | {"rules": RULES, "output_dir": str(folder / "rules")}
    judges = RuleConfig(**given, epochs=3, batch_size=8, seed=seed)
    judge = run_unless_finished(lambda config: RuleTrainer(str(writer), judged, config).train(), judges)
    return writer, judge


def run_ppo(folder: Path, writer: Path, judge: Path, seed: int, damping: float, updates: int) -> None:
    """PPO under the budget, into `folder`."""
    config = PPOConfig(
        **MODEL | {"learning_rate": 1e-3},
        output_dir=str(folder),
        seed=seed,
        updates=updates,
        rollout_size=32,
        epochs=2,
        max_new_tokens=24,
        missing_eos="keep",
        evaluate_every=EVERY,
        rule_model=str(judge),
        rule_budgets=[str(BUDGET)],
        rule_multiplier_damping=damping,
    )
    asked, unseen = PROMPTS[:LEARNED], PROMPTS[LEARNED:]
    run_unless_finished(lambda given: PPOTrainer(str(writer), [known_words], asked, given, unseen).train(), config)


def describe(folder: Path) -> list[str]:
    """The cells of a run: what it sampled in its second half, the highest multiplier, the best evaluation."""
    rows = read_metrics(folder)
    shares = [row[f"reward/rule/{RULE}"] for row in rows if f"reward/rule/{RULE}" in row]
    means = [sum(shares[start : start + EVERY]) / EVERY for start in range(0, len(shares) - EVERY + 1, EVERY)]
    reached = next((EVERY * (number + 1) for number, mean in enumerate(means) if mean <= BUDGET), None)
    half = sorted((folder / "rollouts").glob("*.parquet"))[len(shares) // 2 :]
    sampled = [(row.text, row.parts[f"rule/{RULE}"]) for path in half for row in read_rollout(path)]
    said = [[violates for text, violates in sampled if has_digit(text) is digit] for digit in (False, True)]
    evaluated = [row for row in rows if "validation/preference" in row]
    first, best = evaluated[0], max(evaluated, key=lambda row: row["validation/reward"])
    return [
        f"{shares[0]:.2f}",
        str(reached or "never"),
        f"{sum(map(sum, said)) / len(sampled):.3f}",
        f"{len(said[1]) / len(sampled):.3f}",
        f"{sum(said[0]) / len(said[0]):.3f}",
        f"{max(row.get(f'rule_multiplier/{RULE}', 0.0) for row in rows):.1f}",
        *(f"{first[name]:.2f} to {best[name]:.2f}" for name in (f"validation/rule/{RULE}", "validation/preference")),
    ]


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--damping", nargs="+", type=float, default=[5.0, 0.0])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--runs", type=Path, default=Path("runs/rule-budgets"))
    given = parser.parse_args()
    quiet_libraries()
    heads = ["damping", "seed", "first update", "budget reached", "second half", "digits", "P without one"]
    heads += ["highest multiplier", "best evaluation, violations", "preference"]
    lines = [heads, ["---"] * len(heads)]
    for damping in given.damping:
        for seed in given.seeds:
            folder = given.runs / str(seed) / f"ppo-{damping:g}"
            run_ppo(folder, *train_models(folder.parent, seed), seed, damping, given.updates)
            lines.append([f"{damping:g}", str(seed), *describe(folder)])
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    main()
