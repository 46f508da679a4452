import re
from itertools import combinations
from pathlib import Path

import pytest

from align.data.readers import read_records
from align.data.records import Prompt, Ranking
from tests.files import read_rows

DATA = Path(__file__).parents[2] / "data"
FILES = {"prompts": 420, "prompts_round2": 210, "prompts_heldout": 120, "prompts_validation": 48}
CATEGORIES = {"helpfulness", "truth", "manners", "safety", "instruction", "identity"}
NEAR = 0.8
"""Share of common words from which on two prompts count as the same question in other clothes."""


def read(name):
    return read_rows(DATA / f"{name}.jsonl")


def words_of(prompt):
    turns = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
    return frozenset(re.findall(r"[\w']+", " ".join(turns).lower()))


def prompts_of(name):
    """The prompts of a file; of a demonstration in turns, all but the answer; of a question, the question."""
    for row in read(name):
        yield row.get("prompt") or row.get("question") or row["messages"][:-1]


@pytest.mark.parametrize("name", FILES)
def test_layout_and_equal_parts(name):
    table = read(name)
    records = read_records(str(DATA / f"{name}.jsonl"), Prompt)
    assert len(records) == len(table) >= FILES[name]
    assert {row["category"] for row in table} == CATEGORIES


def test_ids_are_unique():
    ids = [row["id"] for name in FILES for row in read(name)]
    assert len(set(ids)) == len(ids)


def test_no_prompt_is_in_two_files_or_twice_in_one():
    """A question that only changes a word or two of another would let a held-out part measure what was learned by heart."""
    apart = ("demonstrations", "demonstrations_heldout", "rankings_heldout", "truthfulness")
    known = [(name, words) for name in (*FILES, *apart) for words in map(words_of, prompts_of(name))]
    twins = [
        (one, other, " ".join(sorted(words ^ others)))
        for (one, words), (other, others) in combinations(known, 2)
        if (one in FILES or other in FILES) and len(words & others) >= NEAR * len(words | others)
    ]
    assert not twins


@pytest.mark.parametrize(
    ("number", "rows", "prompts", "models"),
    [
        (1, (404, 66), "prompts", {"sft-t0.7", "sft-t1.0"}),
        (2, (199, 31), "prompts_round2", {"sft-t0.7", "sft-t1.0", "ppo1-t0.7"}),
    ],
)
def test_rankings_of_models_answers_are_the_apps_and_the_held_out_prompts_are_apart(number, rows, prompts, models):
    """As the app exported them: ranks that agree with ratings, known models, each labeler under a pseudonym."""
    train, heldout = read(f"rankings_round{number}"), read(f"rankings_round{number}_heldout")
    assert (len(train), len(heldout)) == rows
    assert not {row["id"] for row in train} & {row["id"] for row in heldout}
    assert {row["id"] for row in train + heldout} <= {row["id"] for row in read(prompts)}
    assert {model for row in train + heldout for model in row["model"]} == models
    for row in train + heldout:
        Ranking.from_row(row)
        assert row["labeler"].startswith("labeler-")
        for (rank, rating), (other, worse) in combinations(zip(row["ranks"], row["ratings"], strict=True), 2):
            assert (rank - other) * (rating - worse) <= 0, row["id"]
