"""A mean of the weights under ZeRO 1 and 2: that of one process without DeepSpeed, also after a resume."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align import cli
from align.training.checkpoint.state import StoredState
from tests.launch.launcher import launch_in_turn
from tests.launch.test_launch import ROOT, assert_close, checkpoint_words, metrics

AVERAGED = ["--ema_decay", "0.8", "--validation_prompts", "data/prompts_validation.jsonl", "--evaluate_every", "1"]
AVERAGED += ["--reward_functions", "tests.sampling.rewards:letters"]  # hardly ever the same twice


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--lora_rank", "4"]], ids=["full", "lora"])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_mean_of_the_weights_is_that_of_one_process(
    stage: int, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    one, two = tmp_path / "one", tmp_path / "two"
    words = [*AVERAGED, *more]
    cli.main(["ppo", *checkpoint_words("tiny-llama", one, 2, *words)])
    script, resumed = "align/ppo/train.py", checkpoint_words("tiny-llama", two, 2, *words, "--resume", "true")
    begun = [script, *checkpoint_words("tiny-llama", two, 1, *words)]
    launch_in_turn([begun, [script, *resumed]], tmp_path, f"zero{stage}")

    assert_close(metrics(one), metrics(two), 2e-3)
    states = [dict(StoredState(folder / "checkpoints" / "update-000002")) for folder in (one, two)]
    assert states[0].keys() == states[1].keys()
    means = [name for name in states[0] if name.startswith("average/")]
    assert means
    moved = [name for name in means if not torch.equal(states[0][name], states[0][name.replace("average/", "master/")])]
    assert len(moved) > len(means) / 2, "the mean lags behind the weights"
    for name in states[0]:  # a step moves a weight by about 1e-3
        assert torch.allclose(states[0][name], states[1][name], atol=5e-5), name
    (path,) = (one / "model").glob("*model.safetensors")
    models = [load_file(folder / "model" / path.name) for folder in (one, two)]
    assert all(torch.allclose(models[0][name], models[1][name], atol=5e-5) for name in models[0])
