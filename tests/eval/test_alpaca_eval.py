"""AlpacaEval 2's regression: on generated comparisons, and on its published leaderboard where that data is at hand."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

from align.core.errors import UserError
from align.eval.alpaca_eval import (
    Anchors,
    PromptDifficulty,
    _regression_rows,
    difficulty_controlled_measurement,
    fit_l1,
    read_difficulty,
)
from align.eval.pairwise import PairwiseComparison, length_controlled_measurement, win_rate
from align.eval.winrate import WinrateConfig, read_comparisons, run_winrate
from tests.eval.files import values
from tests.files import write_rows
from tests.research_data import research_data

LENGTH, DIFFICULTY, MODEL = -1.5, 0.8, -1.0
"""The weights behind the generated comparisons."""


def generate(seed=0, prompts=400, mean_delta=600.0, model=MODEL):
    """Comparisons of model 'm' with the baseline 'base', the difficulty of each prompt, and anchors.

    The baseline's lead in length depends on the prompt's difficulty, as in AlpacaEval.
    """
    generator = np.random.default_rng(seed)
    difficulty = generator.normal(0, 1.5, prompts)
    delta = (mean_delta - 200 * difficulty + generator.normal(0, 600, prompts)).round()
    preference = expit(LENGTH * np.tanh(delta / delta.std(ddof=1)) + DIFFICULTY * difficulty + model)
    pairs = [
        PairwiseComparison(f"p{i}", "base", "m", float(1 - preference[i]), (3000, 3000 - int(delta[i])), index=i)
        for i in range(prompts)
    ]
    altered = np.tanh(np.concatenate([generator.normal(1.4, 1, prompts), generator.normal(-0.7, 1, prompts)]))
    features = np.column_stack([altered, np.tile(difficulty, 2), np.zeros(2 * prompts)])
    anchors = Anchors(np.tile(np.arange(prompts), 2), features, expit(features @ [LENGTH, DIFFICULTY, 0]))
    true_rate = float(expit(DIFFICULTY * difficulty + model).mean())
    return pairs, PromptDifficulty(dict(enumerate(difficulty.tolist())), anchors), true_rate


def test_the_generated_rate_is_recovered_and_the_raw_one_is_far_from_it():
    pairs, control, true_rate = generate()
    measured = difficulty_controlled_measurement(pairs, "m", "base", "judge", control)
    assert abs(win_rate(pairs, "m")[0] - true_rate) > 0.05
    assert measured.value == pytest.approx(true_rate, abs=0.003)
    assert measured.low < true_rate < measured.high
    assert measured.n == 400


def test_liblinear_reaches_the_optimum_of_the_documented_objective():
    """|a| + |b| + |c| + C x the weighted log loss, minimized by another method from its definition."""
    pairs, control, _ = generate(seed=1, prompts=60)
    rows = _regression_rows(pairs, "m", control)

    def objective(weights):
        odds = rows.features @ weights
        losses = rows.preference * np.logaddexp(0, -odds) + (1 - rows.preference) * np.logaddexp(0, odds)
        return np.abs(weights).sum() + 0.5 * (rows.weight * losses).sum()

    exact = minimize(objective, np.full(3, 0.1), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
    assert fit_l1(rows, 0.5) == pytest.approx(exact.x, abs=2e-3)
    assert np.abs(exact.x).sum() < 0.9 * (abs(LENGTH) + DIFFICULTY + abs(MODEL)), "the penalty has an effect"


def test_an_anchor_counts_a_tenth_and_has_no_part_of_the_model():
    pairs, control, _ = generate(prompts=40)
    rows = _regression_rows(pairs, "m", control)
    assert rows.features.shape == (120, 3)
    assert rows.weight.tolist() == [1.0] * 40 + [0.1] * 80
    assert rows.features[:40, 2].tolist() == [1.0] * 40
    assert rows.features[40:, 2].tolist() == [0.0] * 80
    assert rows.prompt.tolist() == [*range(40)] * 3, "anchors of a prompt depend on its comparison"


def test_by_position_shifts_the_difficulty_after_a_missing_row():
    pairs, control, _ = generate(prompts=40)
    del pairs[10]
    shifted = PromptDifficulty(control.difficulty, None, by_position=True).of(pairs)
    right = control.of(pairs)
    assert shifted[:10].tolist() == right[:10].tolist()
    assert shifted[10:].tolist() == [control.difficulty[i] for i in range(10, 39)]
    assert right[10:].tolist() == [control.difficulty[i] for i in range(11, 40)]


def test_a_model_that_always_wins_and_one_judged_at_equal_lengths():
    pairs, control, _ = generate(prompts=50)
    winner = [PairwiseComparison(pair.item, "base", "m", 0.0, (9, 9), index=pair.index) for pair in pairs]
    for anchors in (control.anchors, None):
        measured = difficulty_controlled_measurement(winner, "m", "base", "j", PromptDifficulty(control.difficulty, anchors))
        assert 0.8 < measured.low < measured.value < measured.high <= 1


def test_the_interval_covers_the_true_rate():
    covered = 0
    for seed in range(12):
        pairs, control, true_rate = generate(seed, prompts=60)
        generator = np.random.default_rng(100 + seed)
        drawn = [
            PairwiseComparison(
                pair.item, "base", "m", float(generator.random() < pair.outcome), pair.lengths, index=pair.index
            )
            for pair in pairs
        ]
        measured = difficulty_controlled_measurement(drawn, "m", "base", "judge", control)
        covered += measured.low <= true_rate <= measured.high
    assert covered >= 10  # 11.4 expected, standard deviation 0.75


def write_generated(folder: Path, pairs, control):
    annotations = [
        {"instruction": f"Prompt {pair.index}", "index": pair.index, "generator_1": "base", "generator_2": "m"}
        | {"output_1": "x" * pair.lengths[0], "output_2": "x" * pair.lengths[1], "preference": 2 - pair.outcome}
        for pair in pairs
    ]
    difficulty = [{"index": i, "instruction_difficulty": value} for i, value in control.difficulty.items()]
    return write_rows(folder / "annotations.jsonl", annotations), write_rows(folder / "difficulty.jsonl", difficulty)


def test_the_command_reads_annotations_and_difficulty(tmp_path):
    pairs, control, _ = generate(prompts=40)
    annotations, difficulty = write_generated(tmp_path, pairs, control)
    settings = {"comparisons": [str(annotations)], "output": str(tmp_path / "out")}
    baseline, model = run_winrate(WinrateConfig(**settings, difficulty=str(difficulty)))
    expected = difficulty_controlled_measurement(pairs, "m", "base", "", PromptDifficulty(control.difficulty))
    assert values(model.measurements)["win rate"] == pytest.approx(np.mean([1 - pair.outcome for pair in pairs]), abs=1e-12)
    assert values(model.measurements)["win rate, length-controlled"] == pytest.approx(expected.value)
    assert values(baseline.measurements)["win rate, length-controlled"] is None
    with pytest.raises(UserError, match="baseline is 'other'"):
        run_winrate(WinrateConfig(**settings, baseline="other"))
    with pytest.raises(UserError, match=r"anchors is .* difficulty"):
        WinrateConfig(**settings, anchors=str(difficulty))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"preference": 0.5}, "field 'preference': is 0.5"),
        ({"preference": 3}, "field 'preference': is 3"),
        ({"preference": "much"}, "field 'preference': is 'much'"),
        ({"output_2": None}, "field 'output_2'"),
        ({"generator_2": ""}, "field 'generator_2'"),
        ({"index": -1}, "field 'index': is -1"),
    ],
)
def test_a_bad_annotation_names_its_field(tmp_path, row, message):
    good = {"instruction": "Hi", "generator_1": "a", "generator_2": "b", "output_1": "x", "output_2": "y", "preference": 1.5}
    path = write_rows(tmp_path / "a.jsonl", [good | row])
    with pytest.raises(UserError, match=f"a.jsonl:1: {message}"):
        read_comparisons([str(path)], False)


def test_a_failed_annotation_is_no_comparison_and_zero_is_a_tie(tmp_path):
    row = {"instruction": "Hi", "generator_1": "a", "generator_2": "b", "output_1": "xyz", "output_2": "y"}
    path = write_rows(tmp_path / "a.jsonl", [row | {"preference": value} for value in (None, 0, 1.25)])
    tie, loss = read_comparisons([str(path)], False)
    assert (tie.outcome_for("b"), loss.outcome_for("b")) == (0.5, 0.25)
    assert loss.lengths == (3, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"index": 0, "instruction_difficulty": 1}, {"index": 0, "instruction_difficulty": 2}], "duplicate index"),
        ([{"index": 0, "instruction_difficulty": None}], "instruction_difficulty"),
        ([{"index": 0.5, "instruction_difficulty": 1}], "field 'index': is 0.5"),
        ([{"index": 0, "instruction_difficulty": "NaN"}], "field 'instruction_difficulty'"),
    ],
)
def test_a_bad_difficulty_is_one_line(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        read_difficulty(str(write_rows(tmp_path / "d.jsonl", rows)))


def test_a_prompt_without_difficulty_is_named():
    pairs, control, _ = generate(prompts=40)
    with pytest.raises(UserError, match="no row with index 39"):
        PromptDifficulty(dict(list(control.difficulty.items())[:39])).of(pairs)
    unnumbered = [PairwiseComparison("p", "base", "m", 1.0, (1, 2))]
    with pytest.raises(UserError, match="field 'index'"):
        control.of(unnumbered)


# ------------------------------------------------------------------------------------------------- the published leaderboard


@pytest.fixture(scope="module")
def leaderboard():
    folder = research_data("alpaca-eval-2")
    with open(folder / "published.csv", encoding="utf-8") as file:
        published = {row["model"]: row for row in csv.DictReader(file)}
    by_model = {}
    for comparison in read_comparisons([str(folder / "rows.csv.gz")], False):
        by_model.setdefault(comparison.second, []).append(comparison)
    return folder, published, by_model


def test_the_published_length_controlled_rates(leaderboard):
    folder, published, by_model = leaderboard
    files = str(folder / "instruction_difficulty.csv"), str(folder / "gamed.csv.gz")
    as_published = read_difficulty(*files, by_position=True)
    assert len(published) == 16
    for model, row in published.items():
        measured = difficulty_controlled_measurement(by_model[model], model, "baseline", "", as_published)
        stated = float(row["length_controlled_winrate"])
        assert 100 * measured.value == pytest.approx(stated, abs=0.2), model
        assert 100 * measured.low < stated < 100 * measured.high, model
        assert 100 * win_rate(by_model[model], model)[0] == pytest.approx(float(row["win_rate"]), abs=1e-10), model
    right = difficulty_controlled_measurement(
        by_model["text_davinci_001"], "text_davinci_001", "baseline", "", read_difficulty(*files)
    )
    assert 100 * right.value == pytest.approx(6.58, abs=0.2)


def test_without_difficulty_the_interval_contains_the_published_rate(leaderboard):
    _, published, by_model = leaderboard
    contained = 0
    for model, row in published.items():
        measured = length_controlled_measurement(by_model[model], model, "", "baseline")
        contained += measured.low <= float(row["length_controlled_winrate"]) / 100 <= measured.high
    assert contained >= 14


def test_the_command_on_the_leaderboards_files(leaderboard, tmp_path):
    folder, published, _ = leaderboard
    with gzip.open(folder / "rows.csv.gz", "rt") as file:
        lines = [line for line in file if line.startswith(("model,", "claude-2,"))]
    (tmp_path / "rows.csv").write_text("".join(lines))
    found = run_winrate(
        WinrateConfig(
            comparisons=[str(tmp_path / "rows.csv")],
            difficulty=str(folder / "instruction_difficulty.csv"),
            anchors=str(folder / "gamed.csv.gz"),
            difficulty_by="position",
            output=str(tmp_path / "out"),
        )
    )
    measured = {each.model: values(each.measurements) for each in found}["claude-2"]
    assert measured["win rate, length-controlled"] == pytest.approx(
        float(published["claude-2"]["length_controlled_winrate"]) / 100, abs=2e-3
    )
