"""PPO as a whole, on rewards whose optimum is known."""

import json
from pathlib import Path

import pytest

from align.data.readers import write_records
from align.data.records import Prompt
from align.ppo import PPOConfig, run_ppo
from align.ppo.examples import share_of_e


def settings(model: str, folder: Path, **more: object) -> PPOConfig:
    """PPO on a tiny model with random weights: 12 bytes of answer to one of eight one-word prompts."""
    prompts = folder / "prompts.jsonl"
    words = ("red", "green", "blue", "one", "two", "three", "dog", "cat")
    write_records(prompts, [Prompt(prompt=({"role": "user", "content": word},)) for word in words])
    given: dict[str, object] = {
        "model": model,
        "output_dir": str(folder / "run"),
        "prompts": str(prompts),
        "validation_prompts": str(prompts),
        "reward_functions": ["align.ppo.examples:share_of_e"],
        "log_to": ["none"],
        "dtype": "float32",
        "updates": 30,
        "rollout_size": 64,
        "max_new_tokens": 12,
        "missing_end": "keep",
        "learning_rate": 3e-3,
        "kl_beta": 0.0,
        "evaluate_every": 10,
        "max_kl": 1000.0,
    }
    return PPOConfig(**(given | more))


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_the_known_reward_is_the_share_of_a_letter() -> None:
    assert share_of_e([()] * 3, ["eeee", "exex", ""]) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-t5"])
def test_ppo_raises_a_known_reward_to_near_its_optimum(model: str, tmp_path: Path) -> None:
    """A random model says each of 264 tokens alike, so e has a share near 1/264; its optimum is 1."""
    run_ppo(settings(model, tmp_path, updates=48))  # seeds 0 to 3 all arrive by then, and not all by 30
    rows = metrics(tmp_path)
    assert rows[0]["validation/reward"] < 0.05
    assert rows[-1]["validation/reward"] > 0.9
    assert all(row["ratio_error"] < 1 for row in rows[1:])


def test_a_kl_penalty_holds_the_policy_back(tmp_path: Path) -> None:
    """Moving all mass to one of 264 tokens costs log 264 = 5.6 nats a token, far more than the 1/12 of reward it earns."""
    (tmp_path / "free").mkdir()
    (tmp_path / "held").mkdir()
    run_ppo(settings("tiny-gpt2", tmp_path / "free", updates=15))
    run_ppo(settings("tiny-gpt2", tmp_path / "held", updates=15, kl_beta=0.1))
    free, held = metrics(tmp_path / "free")[-1], metrics(tmp_path / "held")[-1]
    assert free["kl/k1"] > 4
    assert held["kl/k1"] < 0.25 * free["kl/k1"]
    assert held["reward/mean"] < free["reward/mean"]


def test_adaptive_kl_raises_its_coefficient_above_the_target(tmp_path: Path) -> None:
    """KL soon passes a target of 0.05 nats: the error is clipped at +0.2, so beta grows by 1 + 0.2 * 64 / 1000 an update."""
    run_ppo(settings("tiny-gpt2", tmp_path, updates=15, kl_beta=0.01, kl_target=0.05, kl_horizon=1000))
    rows = metrics(tmp_path)[1:]
    assert rows[-1]["kl/k1"] > 0.05 * 1.2
    assert rows[-1]["kl/beta"] > rows[0]["kl/beta"]
    late = [row for row in rows if row["kl/k1"] > 0.06]
    following = {row["update"]: row["kl/beta"] for row in rows}
    for row in late:
        if row["update"] + 1 in following:
            assert following[row["update"] + 1] == pytest.approx(row["kl/beta"] * (1 + 0.2 * 64 / 1000), rel=1e-5)
