"""What the demo prints on the way: answers of a few prompts, and times."""

import re
import time

from align.commands.demo_progress import PartTimes, print_answers, sample_answers
from align.core.settings import ModelConfig
from align.data.records import Prompt
from align.sampling.generation import SamplingParams

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
