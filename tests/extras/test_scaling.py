import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align import cli
from align.core.errors import UserError
from align.extras.scaling import (
    CHINCHILLA_FIT,
    CHINCHILLA_TABLE,
    REPLICATED_FIT,
    ScalingLaw,
    TrainingRun,
    allocate,
    fit_scaling_law,
    read_training_runs,
)
from tests.files import write_rows

SIZES, TOKENS = (2e7, 5e7, 1e8, 3e8, 1e9), (5e8, 2e9, 8e9, 3e10)
LAWS = st.builds(
    ScalingLaw, st.floats(0.5, 2), st.floats(20, 1000), st.floats(20, 3000), st.floats(0.2, 0.6), st.floats(0.2, 0.6)
)


def test_the_optimum_by_hand():
    # L = 1 / sqrt(N) + 1 / sqrt(D) is symmetric, so both are sqrt(C / 6).
    assert ScalingLaw(0, 1, 1, 0.5, 0.5).allocate(6e18) == pytest.approx((1e9, 1e9))
    # d/dN: A N^-1.5 / 2 = lambda D; d/dD: B D^-1.5 / 2 = lambda N; so (N / D)^0.5 = A / B, N / D = 4.
    size, tokens = ScalingLaw(0, 2, 1, 0.5, 0.5).allocate(6e18)
    assert size / tokens == pytest.approx(4)
    assert size * tokens == pytest.approx(1e18)


@settings(max_examples=30, deadline=None)
@given(LAWS, st.floats(1e18, 1e25))
def test_no_other_size_has_a_lower_loss(law, flops):
    best = law.loss(*law.allocate(flops))
    for size in np.geomspace(1e6, 1e13, 200):
        assert law.loss(size, flops / (6 * size)) >= best * (1 - 1e-12)


@settings(max_examples=30, deadline=None)
@given(LAWS, st.floats(1e19, 1e24), st.floats(1e8, 1e14))
def test_with_inference_no_other_model_of_this_loss_is_cheaper(law, flops, served):
    def total(size, tokens):
        return size * (6 * tokens + 2 * served)

    largest = law.allocate(flops)
    size, tokens = law.allocate_with_inference(flops, served)
    assert law.loss(size, tokens) == pytest.approx(law.loss(*largest))
    assert size <= largest[0] * (1 + 1e-6)
    assert tokens >= largest[1] * (1 - 1e-6)
    for other in np.geomspace(largest[0] / 100, largest[0] * 3, 300):
        assert total(other, law.tokens_for(law.loss(*largest), other)) >= total(size, tokens) * (1 - 1e-9)


def test_without_inference_it_is_the_optimum_and_with_more_the_model_is_smaller():
    sizes = [REPLICATED_FIT.allocate_with_inference(5.76e23, served)[0] for served in (0, 1e11, 1e12, 1e13)]
    assert sizes[0] == pytest.approx(REPLICATED_FIT.allocate(5.76e23)[0], rel=1e-5)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.5 * sizes[0]


@pytest.mark.parametrize(
    ("flops", "parameters", "tokens"),
    [(1.62e20, 1e9, 27.1e9), (2.46e22, 10e9, 410.1e9), (1.71e24, 67e9, 4.1e12)],
)
def test_the_published_fit_gives_table_a3(flops, parameters, tokens):
    """Approach 3 of table A3. The published constants have four digits, which leaves 5 %."""
    assert CHINCHILLA_FIT.allocate(flops) == pytest.approx((parameters, tokens), rel=0.05)


def test_the_budget_of_gopher():
    """The paper's approach 3 gives 40 billion parameters; Besiroglu et al. report about 20 tokens a parameter."""
    assert CHINCHILLA_FIT.allocate(5.76e23)[0] == pytest.approx(40e9, rel=0.01)
    size, tokens = REPLICATED_FIT.allocate(5.76e23)
    assert 15 < tokens / size < 25


def test_each_row_of_table_3_is_exact():
    for flops, size in CHINCHILLA_TABLE:
        assert allocate(flops) == pytest.approx((size, flops / (6 * size))), flops
    assert allocate(1e19)[0] < 400e6 < 10e12 < allocate(1e29)[0]
    between = allocate(math.sqrt(1.21e20 * 1.23e22))[0]
    assert between == pytest.approx(math.sqrt(1e9 * 10e9))


def runs_of(law, noise=0.0):
    generator = np.random.default_rng(0)
    return [TrainingRun(n, d, law.loss(n, d) * math.exp(noise * generator.normal())) for n in SIZES for d in TOKENS]


@pytest.mark.parametrize("law", [REPLICATED_FIT, ScalingLaw(1.2, 50, 300, 0.25, 0.3)])
def test_a_fit_finds_the_law_behind_runs(law):
    found = fit_scaling_law(runs_of(law))
    assert found == pytest.approx(law, rel=0.01)
    assert found.allocate(1e22)[0] == pytest.approx(law.allocate(1e22)[0], rel=0.01)


def test_one_run_that_diverged_has_little_weight():
    runs = runs_of(REPLICATED_FIT)
    runs[7] = runs[7]._replace(loss=2 * runs[7].loss)
    assert fit_scaling_law(runs).allocate(1e21)[0] == pytest.approx(REPLICATED_FIT.allocate(1e21)[0], rel=0.05)


def test_losses_that_do_not_depend_on_size_are_refused():
    flat = [TrainingRun(n, d, 2 + 300 * d**-0.3) for n in SIZES for d in TOKENS]
    with pytest.raises(UserError, match="do not decrease with both N and D"):
        fit_scaling_law(flat)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"N": 1e8, "D": 1e9, "loss": 3}] * 6, "6 runs with 1 model sizes"),
        ([{"N": 1e8, "D": 1e9}], "field 'loss': is missing"),
        ([{"N": -1, "D": 1e9, "loss": 3}], "field 'N': is -1"),
        ([{"N": 1, "D": 1e9, "loss": "nan"}], "field 'loss': is 'nan'"),
    ],
)
def test_bad_runs_are_one_line(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        read_training_runs(str(write_rows(tmp_path / "runs.jsonl", rows)))


def test_the_command_fits_runs_and_plans_for_inference(tmp_path, capsys, command_error, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["N,D,loss", *(f"{run.parameters},{run.tokens},{run.loss}" for run in runs_of(REPLICATED_FIT))]
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    cli.main(["plan", "--runs", "runs.csv", "--flops", "5.76e23", "--inference_tokens", "1e13"])
    said = capsys.readouterr().out
    assert "fit of 20 runs: E = 1.81" in said
    assert "N = 67 B parameters on D = 1.433 T tokens (21.4 a parameter)" in said
    own, chinchilla, again = (
        [line for line in said.splitlines() if name in line] for name in ("  runs.csv", "approach 3", "Besiroglu")
    )
    assert len(own) == len(chinchilla) == len(again) == 2, "a row for the budget and one with inference"
    assert "72.2" in again[0]
    assert "%" in again[1]
    assert "inference_tokens" in command_error(cli.main, ["plan", "--inference_tokens", "1e9"])
