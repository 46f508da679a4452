import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def main_of(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.slow
def test_ppo_on_objects_in_memory_raises_a_reward_function(tmp_path):
    rewards = main_of("own_reward_function")(output_dir=str(tmp_path / "run"))
    assert len(rewards) == 30
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_fine_tuning_on_a_list_of_dicts_teaches_the_answer(tmp_path):
    assert main_of("own_data_in_memory")(output_dir=str(tmp_path / "run")) == "Phobos."


def test_a_reward_model_of_rankings_orders_answers_in_plain_transformers(tmp_path):
    rewards = main_of("reward_model_elsewhere")(output_dir=str(tmp_path / "run"))
    assert min(rewards[:2]) > rewards[2] > rewards[3]


def test_every_script_is_tested():
    tested = Path(__file__).read_text()
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    assert len(names) == 3
    assert [name for name in names if f'main_of("{name}")' not in tested] == []
