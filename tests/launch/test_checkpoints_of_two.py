import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from align import cli
from align.training.checkpoint.files import integrity_error, write_checksums
from align.training.checkpoint.state import STATE_FILE, StoredState
from tests.launch.compared import compare
from tests.launch.launcher import PPO, ROOT, launch_in_turn, ppo_words
from tests.launch.programs import cases
from tests.launch.programs.cases import spare_weight

DECAYED = (1 - 0.1 * 0.5) ** 4
"""Of a weight that begins at 1: four steps at a rate of 0.1 and a decay of 0.5, which nothing else moves."""
AVERAGED = ["--ema_decay", "0.8", "--validation_prompts", "data/prompts_validation.jsonl", "--eval_steps", "1"]
AVERAGED += ["--reward_functions", "tests.sampling.rewards:letters"]  # hardly ever the same twice


def states(update, *runs):
    """The states of several runs at an update, which have the same names."""
    found = [dict(StoredState(run / "checkpoints" / f"update-{update:06d}")) for run in runs]
    assert found[0].keys() == found[1].keys()
    return found


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates of one process, whose checkpoint has no moments of the spare weight, as if it had no gradient yet."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    spare_weight(folder, 2, resume=False)
    checkpoint = folder / "checkpoints" / "update-000002"
    kept = {k: v for k, v in load_file(checkpoint / STATE_FILE).items() if k.startswith("master") or "spare" not in k}
    save_file(kept, checkpoint / STATE_FILE)
    (checkpoint / "checksums.json").unlink()
    write_checksums(checkpoint)
    return folder


@pytest.mark.parametrize(
    ("settings", "fails"),
    [("zero3", 1), *(pytest.param(name, name != "cpu2", marks=pytest.mark.slow) for name in ("zero1", "zero2", "cpu2"))],
)
def test_two_processes_save_together_or_not_at_all_and_decay_a_spare_weight(begun, settings, fails, tmp_path):
    shutil.copytree(begun, tmp_path / "two")
    shutil.copytree(begun, tmp_path / "one")
    save = [cases.__file__, "failing_save", str(tmp_path), str(int(fails))]
    launch_in_turn([save, [cases.__file__, "spare_weight", str(tmp_path / "two")]], tmp_path, settings)
    errors = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert errors[0].startswith(f"{checkpoints.absolute() / 'update-000002'}: cannot be written (")
    assert errors[0] == errors[1]
    (first,) = checkpoints.iterdir()  # nothing is left of the second
    assert first.name == "update-000001"
    assert integrity_error(first) == ""
    assert sum(path.name.startswith("state") for path in first.iterdir()) == (1 if settings == "cpu2" else 3)

    spare_weight(tmp_path / "one")
    one, two = states(4, tmp_path / "one", tmp_path / "two")
    torch.testing.assert_close(two["master/spare.weight"], torch.full((4, 4), DECAYED))
    for name in two:
        if not name.startswith("step/spare"):  # one process counts the steps of each weight
            torch.testing.assert_close(two[name], one[name], msg=name)


def test_a_zero3_checkpoint_resumes_on_one_process(tmp_path, monkeypatch, capsys):
    """The state on disk knows neither ZeRO stage nor number of processes: PPO goes on alone where two left off."""
    launch_in_turn([[PPO, *ppo_words("tiny-t5", tmp_path / "first", 1)]], tmp_path, "zero3")
    monkeypatch.chdir(ROOT)
    cli.main(["ppo", *ppo_words("tiny-t5", tmp_path / "whole", 2)])
    capsys.readouterr()
    cli.main(["ppo", *ppo_words("tiny-t5", tmp_path / "first", 2, "--resume_from_checkpoint", "true")])
    assert "resumed from" in capsys.readouterr().err
    assert compare(tmp_path / "whole", tmp_path / "first").figure < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--lora_r", "4"]], ids=["full", "lora"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_mean_of_the_weights_under_zero_is_that_of_one_process_also_after_a_resume(stage, more, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    one, two, words = tmp_path / "one", tmp_path / "two", [*AVERAGED, *more]
    cli.main(["ppo", *ppo_words("tiny-llama", one, 2, *words)])
    begun = ppo_words("tiny-llama", two, 1, *words)
    resumed = ppo_words("tiny-llama", two, 2, *words, "--resume_from_checkpoint", "true")
    launch_in_turn([[PPO, *begun], [PPO, *resumed]], tmp_path, f"zero{stage}")
    ours, theirs = states(2, one, two)
    means = [name for name in ours if name.startswith("average/")]
    moved = [name for name in means if not torch.equal(ours[name], ours[name.replace("average/", "master/")])]
    assert len(moved) > len(means) / 2 > 0, "the mean lags behind the weights"
    for name in ours:  # a step moves a weight by about 1e-3
        assert torch.allclose(ours[name], theirs[name], atol=5e-5), name
    found = compare(one, two)
    assert found.figure < 2e-3, found
    assert found.weight < 5e-5, found


@pytest.mark.slow
def test_offload_steps_by_the_gradients_of_weights_that_the_last_loss_leaves_out(tmp_path, monkeypatch):
    """A critic of its own takes no part in ptx, the last loss before each step: its gradients must reach the optimizer."""
    more = ["--critic", "separate", "--ptx.data", "data/demonstrations_heldout.jsonl"]
    more += ["--num_ppo_epochs", "2", "--num_mini_batches", "2"]
    launch_in_turn([[PPO, *ppo_words("tiny-llama", tmp_path / "two", 2, *more)]], tmp_path, "zero3-offload")
    monkeypatch.chdir(ROOT)
    cli.main(["ppo", *ppo_words("tiny-llama", tmp_path / "one", 2, *more)])
    assert compare(tmp_path / "one", tmp_path / "two").figure < 1e-5
    ours, theirs = states(2, tmp_path / "one", tmp_path / "two")
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-5) for key in ours)
