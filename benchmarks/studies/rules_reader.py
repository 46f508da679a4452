"""What a blind reader saw of the study of rules: violations of each policy, and where two readings of an answer differ.

    python -m benchmarks.studies.rules_reader docs/studies/rules

The first table holds the answers before and after (`blind.jsonl`, `blind-key.jsonl`, `verdicts.jsonl`). The second was drawn
later: the control's, among a sixth of the first table's, which are thus read twice (`control-*.jsonl`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from align.statistics import mean_interval

TABLES = (("blind-key.jsonl", "verdicts.jsonl"), ("control-key.jsonl", "control-verdicts.jsonl"))
DIFFERENCES = (("before", "after"), ("before", "control"), ("control", "after"))
ANY = "any"
Answer = tuple[str, int, str]
"""Who wrote it: policy and seed; and the id of its prompt."""
Reading = Mapping[Answer, set[str]]
"""The rules that a reader saw violated in each answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    readings = [reading(parser.parse_args().folder / key, parser.parse_args().folder / said) for key, said in TABLES]
    print(f"| violations | before | after | control | {' | '.join(f'{b} - {a}' for a, b in DIFFERENCES)} |\n|{' --- |' * 7}")
    first = {**readings[1], **readings[0]}
    for rule in [*sorted(set().union(*first.values())), ANY]:
        shares = {policy: share_of(rule, first, policy) for policy in ("before", "after", "control")}
        cells = [f"{each.mean():.1%}" for each in shares.values()]
        for one, other in DIFFERENCES:
            apart = 100 * (shares[other] - shares[one])
            low, high = mean_interval(apart)
            cells.append(f"{apart.mean():+.1f} ({low:+.1f} to {high:+.1f})")
        print(f"| {rule} | {' | '.join(cells)} |")
    for rule, (agree, twice) in agreement(*readings).items():
        print(f"{rule}: the same verdict on {agree} of {twice} answers that were read twice")


def reading(key: Path, verdicts: Path) -> dict[Answer, set[str]]:
    """One table's verdicts, by who wrote each answer."""
    wrote, said = ([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in (key, verdicts))
    violated = {row["number"]: set(row["violates"]) for row in said}
    return {(row["policy"], row["seed"], row["id"]): violated[row["number"]] for row in wrote}


def share_of(rule: str, seen: Reading, policy: str) -> np.ndarray:
    """The share of a prompt's answers in violation, over seeds [prompts]; every seed answered the same prompts."""
    by_prompt: dict[str, list[bool]] = {}
    for (wrote, _, prompt), violated in seen.items():
        if wrote == policy:
            by_prompt.setdefault(prompt, []).append(bool(violated) if rule == ANY else rule in violated)
    return np.array([np.mean(by_prompt[prompt]) for prompt in sorted(by_prompt)])


def agreement(first: Reading, second: Reading) -> dict[str, tuple[int, int]]:
    """By rule: on how many answers two readings agree, of how many that both hold."""
    both = first.keys() & second.keys()
    rules = sorted(set().union(*first.values(), *second.values()))
    return {rule: (sum((rule in first[each]) == (rule in second[each]) for each in both), len(both)) for rule in rules}


if __name__ == "__main__":
    main()
