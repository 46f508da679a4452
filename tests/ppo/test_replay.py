"""A response of a run is sampled again to the bit; what is not kept, or not the same, is one line."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from align import cli
from align.errors import UserError
from align.ppo import run_ppo
from align.ppo.replay import describe_difference, replay, trainer_of_run
from align.ppo.rollout_files import read_rollout, rollout_path, write_rollout
from align.ppo.trainer import PPOTrainer
from tests.ppo.test_learning import settings
from tests.ppo.test_rollout_files import letters, row

RUNS = {
    "tiny-llama": {
        "lora_rank": 4,
        "critic": "separate",
        "value_start": "mean",
        "reference_refresh": 1,
        "normalize_scores": "standardize",
    },
    "tiny-t5": {"kl_target": 1.0, "kl_beta": 0.1, "minibatches": 2, "ema_decay": 0.9},
    "tiny-gpt2": {"advantages": "grpo", "samples_per_prompt": 2, "kl_penalty": "k3", "dtype": "bfloat16"},
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.full if name == "tiny-gpt2" else []) for name in RUNS]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four updates, with the checkpoints after 2 and 4."""
    folder = tmp_path_factory.mktemp("replay")
    more = {"updates": 4, "rollout_size": 8, "rollout_rows": 6, "save_every": 2, "keep_checkpoints": 0}
    run_ppo(settings(request.param, folder, **more, learning_rate=1e-2, evaluate_every=4, epochs=2, **RUNS[request.param]))
    return folder / "run"


@pytest.mark.parametrize(("update", "number", "learn_again"), [(3, 5, 0), (1, 0, 0), (4, 3, 1)])
def test_a_response_comes_out_the_same_to_the_bit(run: Path, update: int, number: int, learn_again: int) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with trainer_of_run(run) as trainer:
        found = replay(trainer, run, update, number, learn_again)
    assert found.recorded == read_rollout(rollout_path(run, update)).rows[number]
    assert found.row == found.recorded
    assert found.difference == ""
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before, "the run was changed"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The run, to be changed."""
    return Path(shutil.copytree(run, tmp_path / "ppo"))


@pytest.mark.parametrize("run", ["tiny-llama"], indirect=True)
def test_the_command_shows_it(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["replay", str(copy.parent), "--update", "3", "--row", "1"])  # the folder of all stages
    shown = capsys.readouterr().out
    recorded = read_rollout(rollout_path(copy, 3)).rows[1]
    assert f"user: {recorded.prompt[0]['content']}" in shown
    assert "reward 0" in shown
    assert "share_of_e 0" in shown
    assert all(f"{value:.4f}" in shown for value in (*recorded.kl, *recorded.advantages, *recorded.log_probs))
    assert "the same to the bit" in shown
    rollout_path(copy, 3).unlink()
    cli.main(["replay", str(copy), "--update", "3", "--row", "7"])
    assert "not compared" in capsys.readouterr().out


@pytest.mark.parametrize("run", ["tiny-llama"], indirect=True)
def test_what_differs_is_one_line(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rollout_path(copy, 3)
    rows = read_rollout(path).rows
    rows[2] = dataclasses.replace(rows[2], kl=[*rows[2].kl[:-1], 7.0])
    write_rollout(path, rows)
    (copy / "environment.json").write_text('{"python": "2.7", "packages": {"torch": "0.1"}}')
    with pytest.raises(SystemExit):
        cli.main(["replay", str(copy), "--update", "3", "--row", "2"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"error: {copy}: update 3, row 2 differs from the recording: kl at token {len(rows[2].kl) - 1} was 7.0 and is "
        in line
    )
    assert "the run had python 2.7 (now " in line
    assert "torch 0.1 (now " in line


@pytest.mark.parametrize("run", ["tiny-llama"], indirect=True)
def test_a_state_that_is_not_kept_is_one_line(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "update-000002")
    with trainer_of_run(copy) as trainer, pytest.raises(UserError) as caught:
        replay(trainer, copy, 4, 0)
    assert str(caught.value) == (
        f"{copy}: the policy before update 4 is not kept (kept: before update 1, 5); save_every 1 and keep_checkpoints 0 "
        "keep every one, and --learn_again 3 learns the 3 updates between again"
    )
    write_rollout(rollout_path(copy, 1), read_rollout(rollout_path(copy, 1)).rows, processes=2)
    wrong = [((5, 0), "no update 5, row 0; the run has updates 1 to 4 and rows 0 to 7"), ((1, 8), "no update 1, row 8")]
    for (update, number), message in [*wrong, ((1, 0), "it ran on 2 processes")]:
        with trainer_of_run(copy) as trainer, pytest.raises(UserError, match=message):
            replay(trainer, copy, update, number)
    with pytest.raises(UserError, match="no run of align ppo in it"), trainer_of_run(copy / "rollouts"):
        pass


def test_a_run_from_python_is_replayed_from_python(tmp_path: Path) -> None:
    config = settings("tiny-gpt2", tmp_path, updates=2, rollout_size=4, evaluate_every=2, save_every=1, keep_checkpoints=0)
    words = ["red", "green", "blue"]
    PPOTrainer("tiny-gpt2", [letters], words, config).train()
    again = PPOTrainer("tiny-gpt2", [letters], words, dataclasses.replace(config, output_dir=str(tmp_path / "again")))
    found = replay(again, tmp_path / "run", 2, 3)
    assert found.recorded is not None
    assert found.difference == ""
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"ids": [5, 9, 7], "tokens": ["Y", "a.", "<eos>"], "text": "Ya."}, "token 1 was 'o.' and is 'a.'"),
        ({"ids": [5, 6], "tokens": ["Y", "o."]}, "ids was [5, 6, 7] and is [5, 6]"),
        ({"reward": 0.2}, "reward was 0.1 and is 0.2"),
        ({"parts": {"model": 0.0}}, "parts was {'model': 0.1, 'brevity': 1e-08} and is {'model': 0.0}"),
        ({"values": [1.0, 2.5, 3.0]}, "values at token 1 was 2.0 and is 2.5"),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, object], expected: str) -> None:
    assert describe_difference(row(0), row(0, **changes)) == expected
