import json
import re
import time

import pytest

from align import cli
from align.commands.demo import (
    HEADLINES,
    PartTimes,
    before_after_row,
    best_of_row,
    evaluate_start_and_end,
    print_answers,
    sample_answers,
)
from align.core.settings import ModelConfig
from align.data.records import Prompt
from align.eval.policy_comparison import PolicyComparison, PolicyResponses
from align.sampling.generation import SamplingParams


def test_the_rows_state_n_and_interval(tmp_path, sharp_folders):
    assert evaluate_start_and_end(tmp_path / "eval.yaml", tmp_path, "tiny-llama", 0) == [], "without settings there are none"
    (tmp_path / "truth.yaml").write_text("limit: 4\n")
    (tmp_path / "eval.yaml").write_text(f"truthfulness: {tmp_path / 'truth.yaml'}\ntoxicity: ''\n")
    (tmp_path / "ppo").symlink_to(sharp_folders["tiny-llama"])
    (row,) = evaluate_start_and_end(tmp_path / "eval.yaml", tmp_path, sharp_folders["tiny-gpt2"], 0)
    stored = json.loads((tmp_path / "eval" / "truthfulness.json").read_text())["models"]
    values = [next(f["value"] for f in model["measurements"] if f["name"] == HEADLINES["truthfulness"]) for model in stored]
    assert [model["model"] for model in stored] == ["tiny-gpt2", "ppo"]
    assert row["name"] == "truthfulness: mc2"
    assert [row["before"], row["after"]] == [round(value, 2) for value in values]
    assert row["note"].startswith("4 items")
    assert " to " in row["interval"]


def test_best_of_n_stands_beside_ppo_by_hand():
    prompts = [Prompt.from_row({"prompt": text}) for text in ("Hi", "Bye")]
    before, after, best = (
        PolicyResponses([], rewards) for rewards in ([0.0, 1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0], [1.5, 4.5])
    )
    row = best_of_row(PolicyComparison(prompts, 2, before, after, 0, 0, 0, 0), best, 16)
    assert (row["before"], row["after"]) == (1.5, 3.0)
    assert row["interval"].startswith("PPO gains +1.00 more (+0.50 to +1.50")  # 2 - 1.5 and 6 - 4.5
    assert "1.84 nats" in row["note"]  # log 16 - 15 / 16
    row = before_after_row("reward", [-0.001, 0.004])
    assert (str(row["before"]), str(row["after"])) == ("0.0", "0.0"), "a zero has no sign"


PROMPTS = [Prompt.from_row({"prompt": text}) for text in ("Name a moon\nof Mars.", "x" * 200)]


def test_each_prompt_stands_above_the_answers_to_it(capsys):
    print_answers(PROMPTS, {"before": ["a\nb", ""], "SFT": ["Phobos.", "y"]}, {"before": [0.5, 0], "SFT": [-1, 0.126]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  prompt  Name a moon of Mars."
    assert lines[1:3] == ["  before  a b  [reward +0.50]", "  SFT     Phobos.  [reward -1.00]"]
    assert lines[3] == "  prompt  " + "x" * 157 + "..."
    assert lines[4:6] == ["  before  (empty)  [reward +0.00]", "  SFT     y  [reward +0.13]"]


def test_the_time_of_each_part_and_of_all_is_printed(capsys):
    times = PartTimes()
    with times.part("SFT"):
        time.sleep(0.01)
    assert capsys.readouterr().out == "\n== SFT ==\n"
    times.seconds |= {"SFT": 61.9, "PPO": 599.0}
    assert str(times) == "time: SFT 1:01, PPO 9:59, total 11:00"


def test_an_answer_is_sampled_for_each_prompt_and_is_the_same_for_the_same_seed():
    first, second, other = (
        sample_answers(ModelConfig(model="tiny-llama"), PROMPTS, SamplingParams(8, 1.0), seed) for seed in (0, 0, 1)
    )
    assert first == second != other
    assert len(first) == 2
    assert all(re.search(r"\S", text) for text in first)


def test_a_mistake_is_one_line(capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--seed", "-1"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: seed")
