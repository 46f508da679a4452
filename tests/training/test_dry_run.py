import pytest

from align import cli
from tests.bad_input.conftest import TINY, refused, snapshot, write_rows  # noqa: F401
from tests.training.test_changed_runs import STAGES

DRY = ("--dry_run", "--overlong", "truncate", "--max_prompt_tokens", "64")
PPO = (
    "--reward_functions align.ppo.toy_rewards:share_of_e --prompts data/prompts_heldout.jsonl --rollout_batch_size 4 "
    "--max_new_tokens 4 --total_updates 4"
)


@pytest.mark.parametrize("stage", [*STAGES, "ppo"])
def test_a_dry_run_prints_the_plan_and_writes_nothing(stage, tmp_path, capsys, align_cache):
    words = PPO if stage == "ppo" else STAGES[stage]
    cli.main([stage, *TINY, *DRY, *words.split(), "--output_dir", str(tmp_path / "run")])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{stage}: ")
    assert lines[-1].startswith("dry run: ")
    assert lines[-1].endswith(f"the model would be in {tmp_path / 'run' / 'model'}; nothing was written")
    assert list(tmp_path.iterdir()) == []
    if stage == "ppo":
        assert "dry run: 4 updates; a checkpoint every 10 minutes;" in lines[-1]  # 14 / 4, rounded up
        assert "4 updates of 4 responses (16 episodes)" in lines


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("ppo --reward_functions nowhere:f", ["nowhere"]),
        ("ppo --reward_functions align.ppo.toy_rewards:share_of_e --prompts nowhere.jsonl", ["nowhere.jsonl"]),
        ("sft --train_data nowhere.jsonl", ["nowhere.jsonl"]),
        ("sft --max_response_tokens 2 --overlong error", ["max_response_tokens"]),
    ],
)
def test_mistakes_are_found(words, parts, refused):  # noqa: F811
    stage, *rest = words.split()
    line = refused(stage, *TINY, "--dry_run", *rest, alone=False)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("stage", ["ppo", "sft"])
def test_a_dry_run_of_a_run_that_would_continue_compares_and_changes_nothing(stage, tmp_path, capsys, align_cache):
    data = write_rows(tmp_path / "data.jsonl", *({"prompt": f"Is {i} odd?", "completion": "Yes."} for i in range(4)))
    other = write_rows(tmp_path / "other.jsonl", *({"prompt": f"Is {i} even?", "completion": "No."} for i in range(4)))
    name = "--prompts" if stage == "ppo" else "--train_data"
    words = {
        "ppo": "--reward_functions align.ppo.toy_rewards:share_of_e --rollout_batch_size 4 --max_new_tokens 4 "
        "--num_ppo_epochs 1 --total_updates",
        "sft": "--batch_size 4 --num_train_epochs",
    }[stage].split()
    words = [stage, *TINY, "--save_steps", "1", "--output_dir", str(tmp_path / "run"), *words]
    cli.main([*words, "2", name, str(data)])
    before = snapshot(tmp_path)
    dry = [*words, "5", "--resume_from_checkpoint", "auto", "--dry_run", name]
    cli.main([*dry, str(data)])
    line = f"dry run: 5 updates, from {tmp_path / 'run'}/checkpoints/update-000002; a checkpoint every 1; 3 updates left;"
    assert line in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main([*dry, str(other)])
    assert ended.value.code == 2
    assert "are not those that this run" in capsys.readouterr().err.splitlines()[-1]
    assert snapshot(tmp_path) == before
