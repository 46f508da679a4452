"""Tables of studies against their raw results."""

import gzip
import json
import re

import pytest

from benchmarks.studies import t5_from_scratch
from tests.files import ROOT
from tests.project.markdown import page, table

FOLDER = ROOT / "docs" / "studies" / "critic"


@pytest.mark.parametrize("seed", range(3))
def test_the_table_of_the_critics_study(seed):
    rows = {row[0].strip("*"): row[seed + 1].strip("*") for row in table(page("studies/critic"), "| seed 0 | seed 1")}
    updates = [json.loads(line) for line in (FOLDER / f"metrics-{seed}.jsonl").read_text().splitlines()]
    explained = [update["value/explained_variance"] for update in updates if update["update"] >= 9]
    assert len(explained) == 4
    assert f"{sum(explained) / 4:.2f}" == rows["explained variance, mean of updates 9 to 12"]
    text = gzip.decompress((FOLDER / f"comparisons-{seed}.jsonl.gz").read_bytes()).decode()
    comparisons = [json.loads(line) for line in text.splitlines()]
    assert len(comparisons) == 248
    points = {-1: 1.0, 0: 0.5, 1: 0.0}
    total = 0.0
    for row in comparisons:
        policy = row["model"].index(f"ppo-seed{seed}")
        rank, other = row["ranks"][policy], row["ranks"][1 - policy]
        total += points[(rank > other) - (rank < other)]
    rate, low, high = map(float, re.findall(r"[\d.]+", rows["blind win rate against the SFT model"]))
    assert rate == pytest.approx(100 * total / 248, abs=0.05)
    assert low < rate < high


def test_the_tables_of_the_study_of_t5():
    text = page("studies/t5-from-scratch")
    rows = [json.loads(line) for line in (FOLDER.parent / "t5-from-scratch" / "results.jsonl").read_text().splitlines()]
    assert {(row["model"], row["seed"]) for row in rows} == {(kind, seed) for kind in ("t5", "gpt2") for seed in (1, 2, 3)}
    assert t5_from_scratch.table(rows) in text
    assert t5_from_scratch.mistakes(rows) in text
