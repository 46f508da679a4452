"""PPO with vLLM: the settings of its runs, and an engine alone."""

import pytest

from tests.files import write_rows
from tests.sampling.rewards import PROMPTS
from tests.settings import run_settings


@pytest.fixture
def common_settings(tmp_path, sharp_folders):
    """What all runs with vLLM share; the rate is so high that an update shows in every weight."""
    path = tmp_path / "prompts.jsonl"
    write_rows(path, ({"prompt": text} for text in PROMPTS))
    return run_settings(
        tmp_path / "run",
        model=sharp_folders["tiny-llama"],
        reward_functions=["tests.sampling.rewards:letters"],
        prompts=str(path),
        total_updates=2,
        num_ppo_epochs=1,
        learning_rate=1e-2,
        missing_eos_score=None,
    )


@pytest.fixture
def settings(common_settings):
    """A run with a vLLM server, which is evaluated and saved after every update."""
    return common_settings | {
        "validation_prompts": common_settings["prompts"],
        "eval_steps": 1,
        "rollout_batch_size": 4,
        "max_new_tokens": 6,
        "temperature": 0.8,
        "save_steps": 1,
        "seed": 3,
        "engine": "vllm-server",
        "vllm": {"timeout": 20.0},
    }


@pytest.fixture
def make_engine_of(make_ppo, load_sharp):
    """`make_engine_of(url, longest)`: an engine alone, around the sharpened tiny-llama, closed after the test."""
    from align.sampling.engines import make_engine

    made = []

    def make(url, longest=16, timeout=30.0, **loading):
        trainer = make_ppo(load_sharp("tiny-llama", **loading), engine="vllm-server", vllm={"url": url, "timeout": timeout})
        made.append(make_engine(trainer.config, trainer.engine, trainer.loaded, longest))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
