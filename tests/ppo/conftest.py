"""Short runs of PPO, and reward functions as a user writes them."""

import sys

import pytest

from tests.settings import run_settings


@pytest.fixture
def make_config(tmp_path):
    """`make_config(total_updates=3)`: settings of a short run in float32, in the folder `run` unless another is given."""
    from align.ppo import PPOConfig

    def make(folder="run", **settings):
        given = run_settings(tmp_path / folder, total_updates=1)
        return PPOConfig(**(given | {"rollout_batch_size": 4, "max_new_tokens": 6} | settings))

    return make


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module in the working directory, as a user would write it."""

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write
