"""What a blind reader saw, counted by hand."""

import json

import pytest

from benchmarks.studies.rules_reader import ANY, TABLES, agreement, reading, share_of


@pytest.fixture
def readings(tmp_path):
    """Two seeds answered two prompts; one answer is read twice."""
    wrote = [("before", 0, "p"), ("before", 1, "p"), ("before", 0, "q"), ("before", 1, "q")]
    tables = [(wrote, [["a"], [], ["a", "b"], ["b"]]), ([("control", 0, "p"), ("before", 0, "q")], [["b"], ["a"]])]
    for (key, verdicts), (answers, violates) in zip(TABLES, tables, strict=True):
        rows = [{"number": n, "policy": policy, "seed": seed, "id": id} for n, (policy, seed, id) in enumerate(answers)]
        said = [{"number": n, "violates": found} for n, found in enumerate(violates)]
        for name, content in ((key, rows), (verdicts, said[::-1])):
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    return [reading(tmp_path / key, tmp_path / verdicts) for key, verdicts in TABLES]


def test_shares_of_prompts(readings):
    first, second = readings
    assert share_of("a", first, "before").tolist() == [0.5, 0.5]
    assert share_of("b", first, "before").tolist() == [0.0, 1.0]
    assert share_of(ANY, first, "before").tolist() == [0.5, 1.0]
    assert share_of("b", second, "control").tolist() == [1.0]


def test_agreement(readings):
    assert agreement(*readings) == {"a": (1, 1), "b": (0, 1)}
