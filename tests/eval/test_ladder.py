"""The ladder: rungs by hand, best-of-n keeps what its reward model likes, and a whole run with its picture."""

import json
from pathlib import Path

import pytest

from align.errors import UserError
from align.eval.core.answers import keep_best
from align.eval.core.results import read_evaluations
from align.eval.ladder import LadderConfig, run_ladder, rung_figure
from align.eval.winrate.pairwise import PairwiseComparison
from align.examples import SampledResponse

HI = ({"role": "user", "content": "Hi"},)


def prefer_long(prompts, first, second):
    """A judge: the chance that the first answer wins is 1 where it is longer, 0.5 where both are as long."""
    return [0.5 + 0.5 * ((len(a) > len(b)) - (len(a) < len(b))) for a, b in zip(first, second, strict=True)]


def test_a_rung_against_another_by_hand():
    outcomes = [("base", "sft", 0.0), ("base", "sft", 0.0), ("base", "sft", 0.5), ("sft", "ppo", 0.0)]
    comparisons = [PairwiseComparison(str(n), *outcome, (1, 1)) for n, outcome in enumerate(outcomes)]
    figures = [rung_figure(comparisons, rung, "sft", "judge") for rung in ("base", "sft", "ppo", "other")]
    assert [figure.value for figure in figures] == [pytest.approx(0.5 / 3), 0.5, 1.0, None]
    assert [figure.n for figure in figures] == [3, 0, 1, 0]


def test_the_best_of_each_group_is_kept_and_of_equal_ones_the_first():
    answers = [SampledResponse(HI, [1], [number], str(number)) for number in range(6)]
    assert [kept.text for kept in keep_best(answers, [0, 2, 1, 5, 5, 4], 3)] == ["1", "3"]


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi", "Count to three.", "Who?", "Where?")))
    return {
        "prompts": str(path), "judge": f"{__name__}:prefer_long", "max_new_tokens": 8, "dtype": "float32",
        "resamples": 100, "output": str(tmp_path / "out"), "table": False,
    }  # fmt: skip


def test_a_whole_ladder_with_its_picture(settings, reward_folders):
    rungs = ["tiny-llama", "tiny-llama+shots", "tiny-gpt2", "tiny-gpt2+best"]
    more = {"shots": 1, "best_of": 3, "best_of_reward": reward_folders["tiny-gpt2"], "against": "tiny-gpt2"}
    run_ladder(LadderConfig(models=rungs, **more, **settings))
    out = read_evaluations(Path(settings["output"], "ladder.json"))
    assert [each.model for each in out] == rungs
    assert {figure.name for each in out for figure in each.figures} == {"preferred to tiny-gpt2"}
    assert out[2].figures[0].value == 0.5
    picture = Path(settings["output"], "ladder.svg").read_text()
    assert all(rung in picture for rung in rungs)
    chosen = Path(settings["output"], "winrate-tiny-gpt2+best-chosen.jsonl").read_text().splitlines()
    assert [len(json.loads(row)["rewards"]) for row in chosen[1:]] == [3] * 4


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"models": []}, "models is empty"),
        ({"models": ["tiny-llama"]}, "two or more models"),
        ({"models": ["tiny-llama", "tiny-gpt2"], "against": "x"}, "one of tiny-llama, tiny-gpt2"),
        ({"models": ["tiny-llama", "tiny-gpt2+best"]}, "set best_of and best_of_reward"),
        ({"models": ["tiny-llama", "tiny-gpt2"], "best_of": 4, "best_of_reward": "r"}, "name one, such as tiny-llama.best"),
        ({"models": ["tiny-llama", "tiny-gpt2+best"], "best_of": 4}, "best_of_reward"),
    ],
)
def test_a_mistake_is_one_line(settings, more, complaint):
    with pytest.raises(UserError, match=complaint) as caught:
        run_ladder(LadderConfig(**settings, **more))
    assert "\n" not in str(caught.value)
