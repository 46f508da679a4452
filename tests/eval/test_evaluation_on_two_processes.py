"""Evaluations under `accelerate launch` with two processes: the numbers of one. All of them share one launch."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from align.eval.results import read_evaluations
from align.eval.reward import RewardEvalConfig, run_reward_eval
from align.eval.toxicity import ToxicityConfig, run_toxicity
from align.eval.truthfulness import TruthfulnessConfig, run_truthfulness
from tests.eval.files import stored_rows
from tests.files import write_rows
from tests.launch.launcher import launch_in_turn

pytestmark = pytest.mark.slow
TRUTHFULNESS = {"models": "tiny-llama", "dtype": "float32", "limit": 5, "max_new_tokens": 4}
TOXICITY = {"models": "tiny-llama", "samples": 3, "max_new_tokens": 6, "dtype": "float32"}
TOXICITY |= {"scorer": "tests.eval.test_evaluation_on_two_processes:swears"}
REWARD = {"samples": 3, "dtype": "float32", "max_new_tokens": 6}


def swears(texts: list[str]) -> list[float]:
    """A scorer: 1 for a text with the letter a or e, else 0."""
    return [float(any(letter in text.lower() for letter in "ae")) for text in texts]


def words_of(task: str, settings: dict[str, Any], output: Path) -> list[str]:
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [f"align/eval/{task}.py", *words, "--output", str(output)]


@pytest.fixture(scope="module")
def two(sharp_folders, reward_folders, tmp_path_factory):
    """What the two processes wrote and printed, and the settings of each evaluation."""
    folder = tmp_path_factory.mktemp("two")
    tempting = [{"id": f"p{n}", "prompt": "The " + "very " * n + "old man is a", "toxicity": n / 4} for n in range(4)]
    toxicity = TOXICITY | {"prompts": write_rows(folder / "tempting.jsonl", tempting)}
    ranked = [{"prompt": text, "responses": ["a b", "c"], "ranks": [1, 2]} for text in ("Hi", "Count to three.", "Who?")]
    reward = REWARD | {"reward_model": reward_folders["tiny-llama"], "models": sharp_folders["tiny-gpt2"]}
    reward |= {name: write_rows(folder / f"{name}.jsonl", ranked) for name in ("preferences", "prompts")}
    tasks = {"truthfulness": TRUTHFULNESS, "toxicity": toxicity, "reward": reward}
    scripts = [words_of(task, settings, folder / task) for task, settings in tasks.items()]
    printed = launch_in_turn(scripts, folder, "cpu2")
    return SimpleNamespace(folder=folder, printed=printed, toxicity=toxicity, reward=reward)


def one(settings: dict[str, Any], output: Path) -> dict[str, Any]:
    """The same settings for one process, which is this one."""
    return settings | {"models": [settings["models"]], "output": str(output)}


def test_truthfulness(two, tmp_path):
    run_truthfulness(TruthfulnessConfig(**one(TRUTHFULNESS, tmp_path)))
    name = "truthfulness-choice-tiny-llama.jsonl"
    alone, together = stored_rows(tmp_path / name), stored_rows(two.folder / "truthfulness" / name)
    assert list(alone) == list(together)
    for item, row in alone.items():
        for kind in ("correct", "incorrect"):
            assert row[kind] == pytest.approx(together[item][kind], rel=0, abs=1e-5)


def test_toxicity(two, tmp_path):
    (alone,) = run_toxicity(ToxicityConfig(**one(two.toxicity, tmp_path)))
    (together,) = read_evaluations(two.folder / "toxicity" / "toxicity.json")
    name = "toxicity-tiny-llama.jsonl"
    texts, same = (
        {item: row["texts"] for item, row in stored_rows(path / name).items()}
        for path in (tmp_path, two.folder / "toxicity")
    )
    assert texts == same
    assert together == alone


def test_reward(two, tmp_path):
    alone = run_reward_eval(RewardEvalConfig(**one(two.reward, tmp_path)))
    found = [each for task in ("reward", "best-of-n") for each in read_evaluations(two.folder / "reward" / f"{task}.json")]
    assert [each.model for each in found] == [each.model for each in alone]
    for ours, theirs in zip(alone, found, strict=True):
        for measurement, twin in zip(ours.measurements, theirs.measurements, strict=True):
            assert (measurement.name, measurement.n, measurement.scorer) == (twin.name, twin.n, twin.scorer)
            for end in ("value", "low", "high"):
                number, other = getattr(measurement, end), getattr(twin, end)
                assert number == (None if other is None else pytest.approx(other, rel=1e-5, abs=1e-5))  # rewards go up to 9
    assert two.printed.count("best-of-n: reward, best of 1") == 1  # one process prints
