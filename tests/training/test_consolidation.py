import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from align import cli
from align.core.errors import UserError
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.training.checkpoint.files import write_checksums
from align.training.checkpoint.state import FlatTensorSlice, StoredState, shard_file
from tests.files import ROOT
from tests.settings import run_settings
from tests.training.toy_modules import write_shards

COMMON = run_settings(model="tiny-llama", overlong="truncate", max_prompt_tokens=64)


PPO = {"reward_functions": ["tests.ppo.rewards:letters"], "rollout_batch_size": 4, "max_new_tokens": 6}
PPO |= {"stop_token_ids": [7], "missing_eos_score": None}


def train(folder: Path, **more) -> Path:
    """PPO of one update, without evaluation: its model is that of the checkpoint."""
    run_ppo(PPOConfig(**COMMON, **PPO, **more, output_dir=str(folder), total_updates=1, learning_rate=1e-3, save_steps=1))
    return folder


def in_parts(folder: Path, processes: int) -> None:
    """Rewrite a checkpoint as several processes would have written it, one run of every tensor each."""
    checkpoint = folder / "checkpoints" / "update-000001"
    stored = dict(StoredState(checkpoint))
    (checkpoint / "state.safetensors").unlink()
    for process in range(processes):
        cuts = {name: value.flatten().tensor_split(processes) for name, value in stored.items()}
        starts = {name: sum(map(len, runs[:process])) for name, runs in cuts.items()}
        kept = {name: runs[process] for name, runs in cuts.items() if runs[process].numel()}
        parts = {name: FlatTensorSlice(run, starts[name], tuple(stored[name].shape)) for name, run in kept.items()}
        write_shards(checkpoint / shard_file(process, processes), parts)
    (checkpoint / "checksums.json").unlink()
    write_checksums(checkpoint)


@pytest.mark.parametrize("more", [{}, {"lora_r": 4}], ids=["full", "lora"])
def test_the_folder_is_the_trained_model(more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    run = train(tmp_path / "run", **more)
    in_parts(run, 3)
    left_over = tmp_path / ".whole-ab12cd34.partial"  # of a call that was killed
    (left_over / "deeper").mkdir(parents=True)
    capsys.readouterr()
    cli.main(["model", "consolidate", str(run), "--output", str(tmp_path / "whole")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "whole")
    assert not left_over.exists()
    names = {path.name for path in (run / "model").iterdir()}
    assert {path.name for path in (tmp_path / "whole").iterdir()} == names
    endings = [json.loads((folder / "generation_config.json").read_text()) for folder in (run / "model", tmp_path / "whole")]
    assert endings[0] == endings[1]
    assert 7 in endings[0]["eos_token_id"]
    (weights,) = (run / "model").glob("*model.safetensors")
    trained, found = load_file(weights), load_file(tmp_path / "whole" / weights.name)
    assert trained.keys() == found.keys()
    assert all(torch.equal(trained[name], found[name]) for name in trained)
    if not more:
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    at_once = run / "checkpoints" / "update-000001"
    cli.main(["model", "consolidate", str(at_once), "--output", str(tmp_path / "again")])
    again = load_file(tmp_path / "again" / weights.name)
    assert all(torch.equal(trained[name], again[name]) for name in trained)


def test_the_mean_of_the_weights_is_taken_where_one_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run = train(tmp_path / "run", ema_decay=0.5)
    cli.main(["model", "consolidate", str(run), "--output", str(tmp_path / "whole")])
    stored = StoredState(run / "checkpoints" / "update-000001")
    name = "model.layers.0.mlp.up_proj.weight"
    found = load_file(tmp_path / "whole" / "model.safetensors")[name]
    assert torch.equal(found, stored[f"average/backbone.model.{name}"])
    assert not torch.equal(found, stored[f"master/backbone.model.{name}"])


def test_what_cannot_be_consolidated_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)

    def refused(source: Path) -> str:
        with pytest.raises(SystemExit):
            cli.main(["model", "consolidate", str(source), "--output", str(tmp_path / "whole")])
        assert not (tmp_path / "whole").exists()
        return capsys.readouterr().err

    assert f"{tmp_path}: neither a checkpoint nor a run with checkpoints" in refused(tmp_path)
    data = {"train_data": "data/rankings_heldout.jsonl", "batch_size": 30, "max_response_tokens": 16, "save_steps": 2}
    run_reward(RewardConfig(**COMMON, **data, output_dir=str(tmp_path / "reward")))
    assert "it is of a reward model, whose mean over demonstrations is taken when" in refused(tmp_path / "reward")
    run = train(tmp_path / "run")
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("model: tiny-llama", "model: tiny-gpt2"))
    assert "its weights are not those of model 'tiny-gpt2'" in refused(run)
    (run / "checkpoints" / "update-000001" / "state.safetensors").write_bytes(b"torn")
    assert "state.safetensors has 4 bytes instead of" in refused(run / "checkpoints" / "update-000001")
    shutil.rmtree(run / "checkpoints")
    assert "neither a checkpoint nor a run with checkpoints (see save_steps)" in refused(run)


SHAPES = {"matrix": (5, 3), "vector": (7,), "cube": (2, 3, 2), "number": ()}


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.arange(1.0, math.prod(shape) + 1).reshape(shape) for name, shape in SHAPES.items()}


def write(folder: Path, cuts: list[int]) -> None:
    """One file for each run between cuts, the same for every tensor; the empty runs of small tensors are left out."""
    for process, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        runs = {name: FlatTensorSlice(value.flatten()[begin:end], begin, SHAPES[name]) for name, value in tensors().items()}
        kept = {name: part for name, part in runs.items() if part.values.numel()}
        write_shards(folder / shard_file(process, len(cuts) - 1), kept)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same tensors whole, in one part, in two, and in four of other sizes."""
    whole = tmp_path_factory.mktemp("whole")
    save_file(tensors(), whole / "state.safetensors")
    made = [whole]
    for cuts in ([0, 15], [0, 8, 15], [0, 1, 4, 12, 15]):
        made.append(tmp_path_factory.mktemp("parts"))
        write(made[-1], cuts)
    return made


def test_parts_of_any_number_of_processes_are_the_whole_tensors(folders):
    for folder in folders:
        stored = StoredState(folder)
        assert stored.shapes == SHAPES
        for name, value in tensors().items():
            assert torch.equal(stored[name], value), (folder, name)


@given(start=st.integers(0, 14), count=st.integers(0, 15), name=st.sampled_from(sorted(SHAPES)))
def test_every_run_is_read_from_every_layout(folders, start, count, name):
    flat = tensors()[name].flatten()
    for folder in folders:
        assert torch.equal(StoredState(folder).part(name, start, count), flat[start : start + count])


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        # Lengths alone add up to the whole in the first two: twice the numbers 0 to 3 of 8, and a gap after 3.
        ([(4, 0), (4, 0)], "two parts of 'a' overlap"),
        ([(3, 0), (5, 4)], "a part of 'a' is missing"),
        ([(5, 0)], "a part of 'a' is missing"),
    ],
)
def test_parts_that_are_not_the_whole_are_an_error(parts, why, tmp_path):
    for process, (count, start) in enumerate(parts):
        write_shards(tmp_path / shard_file(process, 2), {"a": FlatTensorSlice(torch.arange(1.0 * count), start, (8,))})
    with pytest.raises(UserError, match=why):
        StoredState(tmp_path)
