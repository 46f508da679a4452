import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align.core.errors import UserError
from align.ppo import PPOTrainer
from tests.launch.compared import metrics as timeless
from tests.ppo.rewards import letters
from tests.ppo.test_train import metrics, settings

WAYS = {
    "tiny-t5": {},
    "tiny-gpt2": {"dtype": "bfloat16", "critic": "separate"},
    "tiny-llama": {"lora_r": 4, "critic": "separate"},
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name == "tiny-gpt2" else []) for name in WAYS]
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PPOTrainer:
    """Six updates, with a refresh after 2, 4 and 6 and an evaluation after each."""
    folder = tmp_path_factory.mktemp("refresh")
    more = {"total_updates": 6, "rollout_batch_size": 8, "eval_steps": 1, "save_steps": 1, "save_total_limit": 0}
    more |= {"reference_refresh": 2, "learning_rate": 1e-2, "kl_coef": 0.1} | WAYS[request.param]
    config = settings(request.param, folder, **more)
    trainer = PPOTrainer(config.model, [letters], config.prompts, config, config.prompts)
    trainer.train()
    return trainer


def test_kl_is_reported_against_both(trained: PPOTrainer) -> None:
    rows = metrics(Path(trained.config.output_dir).parent)
    first, second, *later = rows[1:]
    assert first["kl/k1"] == first["kl/initial_policy"] == 0.0
    assert second["kl/k1"] == second["kl/initial_policy"] != 0.0, "until the first refresh the reference is the start"
    third, fourth, fifth, _ = later
    for row in (third, fifth):
        assert row["kl/k1"] == row["kl/k3"] == 0.0, "the policy has just become the reference"
        assert row["kl/initial_policy"] != 0.0
    assert fourth["kl/k1"] != 0.0
    assert fourth["kl/k1"] != fourth["kl/initial_policy"]
    # The evaluation after update 2 comes after the refresh, and is against the start.
    assert all(row["validation/kl"] != 0.0 for row in rows[2:])


def test_a_checkpoint_has_the_reference_once_it_is_no_longer_the_start(trained: PPOTrainer) -> None:
    folder = Path(trained.config.output_dir) / "checkpoints"
    assert not (folder / "update-000001" / "reference_refresh.safetensors").exists()
    found = {update: load_file(folder / f"update-{update:06d}" / "reference_refresh.safetensors") for update in range(2, 7)}
    assert all(torch.equal(found[2][name], found[3][name]) for name in found[2])
    assert not all(torch.equal(found[3][name], found[4][name]) for name in found[2])
    refreshed = next(each for each in trained.setup.extensions if each.updates_reference)
    assert all(torch.equal(weight, refreshed.sources[name]) for name, weight in refreshed.weights.items()), "after update 6"
    assert not any(weight.requires_grad for weight in refreshed.weights.values())


@pytest.mark.parametrize("update", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_resumed_run_is_the_unbroken_one(trained: PPOTrainer, update: int, tmp_path: Path) -> None:
    """From the checkpoints after update 1, where the reference is the start, and 3, where it is the policy after 2."""
    run, again = Path(trained.config.output_dir), tmp_path / "run"
    kept = f"checkpoints/update-{update:06d}"
    shutil.copytree(run / kept, again / kept)
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl"):
        shutil.copy(run / name, again / name)
    config = dataclasses.replace(trained.config, output_dir=str(again), resume_from_checkpoint=True)
    prompts = str(run.parent / "prompts.jsonl")
    PPOTrainer(config.model, [letters], prompts, config, prompts).train()
    assert timeless(again) == timeless(run)
    for name in ("state.safetensors", "reference_refresh.safetensors"):
        ours, whole = (load_file(folder / "checkpoints" / "update-000006" / name) for folder in (again, run))
        assert ours.keys() == whole.keys()
        assert all(torch.equal(ours[key], whole[key]) for key in whole)
    changed = dataclasses.replace(config, reference_refresh=3)
    with pytest.raises(UserError, match="this run has reference_refresh 2, not 3"):
        PPOTrainer(config.model, [letters], prompts, changed, prompts)
