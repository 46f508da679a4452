import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align import cli
from align.training.checkpoint.files import (
    FORMAT,
    integrity_error,
    latest_valid_checkpoint,
    quarantine_later,
    rotate_checkpoints,
    write_checksums,
)
from tests.bad_input.conftest import TINY, write_rows
from tests.launch.launcher import launch

PLANTED = Path("/tmp/planted-by-a-checkpoint")


class Planted:
    """What runs a command when it is unpickled."""

    def __reduce__(self):
        return PLANTED.write_text, ("pickle was loaded",)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of four updates that keeps its two newest checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_rows(folder / "demos.jsonl", *({"prompt": f"Is {i} odd?", "completion": "Yes."} for i in range(4)))
    cli.main(words(data, folder / "run"))
    return folder / "run"


def words(data: Path, run: Path, *more: str) -> list[str]:
    settings = ["--num_train_epochs", "4", "--save_steps", "1", "--learning_rate", "1e-3", *more]
    return ["sft", *TINY, "--train_data", str(data), "--output_dir", str(run), *settings]


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def flip(folder: Path) -> None:
    data = bytearray((folder / "state.safetensors").read_bytes())
    data[-100] ^= 1
    (folder / "state.safetensors").write_bytes(data)


def tear(folder: Path) -> None:
    data = (folder / "state.safetensors").read_bytes()
    (folder / "state.safetensors").write_bytes(data[: len(data) // 2])


def other_version(folder: Path) -> None:
    stored = json.loads((folder / "checksums.json").read_text())
    (folder / "checksums.json").write_text(json.dumps(stored | {"format": FORMAT + 1}))


def plant_pickle(folder: Path) -> None:
    (folder / "state.safetensors").write_bytes(pickle.dumps(Planted()))


OTHER_BYTES, OTHER_SIZE = "state.safetensors holds other bytes than were written", "state.safetensors has "


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip, OTHER_BYTES),
        (tear, OTHER_SIZE),
        (plant_pickle, OTHER_SIZE),
        (other_version, f"another version of this package wrote it (format {FORMAT + 1}, here {FORMAT})"),
        (lambda folder: (folder / "trainer.json").unlink(), "trainer.json cannot be read (No such file or directory)"),
        (lambda folder: (folder / "checksums.json").unlink(), "checksums.json is missing; an earlier version wrote it, or"),
        (lambda folder: (folder / "checksums.json").write_text('{"format": 1, "fil'), "checksums.json is broken"),
    ],
)
def test_each_damage_is_named_and_the_checkpoint_before_is_taken(damage, named, run):
    last, before = (run / "checkpoints" / f"update-{update:06d}" for update in (4, 3))
    damage(last)
    fault = integrity_error(last)
    assert fault.startswith(named)
    assert latest_valid_checkpoint(run) == (before, [f"{last}: {fault}"])
    assert not PLANTED.exists()


def test_the_last_good_checkpoint_is_used_and_the_user_is_told(whole, run, capsys):
    last, before = (run / "checkpoints" / f"update-{update:06d}" for update in (4, 3))
    flip(last)
    cli.main(words(whole.parent / "demos.jsonl", run, "--resume_from_checkpoint", "auto"))
    printed = capsys.readouterr().err
    assert f"warning: {last}: {OTHER_BYTES}" in printed
    assert f"resuming from {before}" in printed
    assert f"{last} was renamed to broken-update-000004" in printed
    assert sorted(path.name for path in last.parent.iterdir()) == ["broken-update-000004", before.name, last.name]
    for place in ("model/model.safetensors", "checkpoints/update-000004/state.safetensors"):
        ours, theirs = load_file(run / place), load_file(whole / place)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_continues_from_a_checkpoint_of_another_run(whole, run, tmp_path, capsys):
    data, first = whole.parent / "demos.jsonl", run / "checkpoints" / "update-000003"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    cli.main(words(data, tmp_path / "second", "--resume_from_checkpoint", str(first)))
    assert f"resumed from {first}" in capsys.readouterr().err
    lines = (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [4]
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (tmp_path / "second", whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("{run}/checkpoints/update-000003", "resume_from_checkpoint {path}: it is not the newest checkpoint in {run}"),
        ("{run}/checkpoints/update-000009", "resume_from_checkpoint {path}: it is not the newest checkpoint in {run}"),
        ("nowhere", "resume_from_checkpoint {path}: no such folder"),
        (
            "{whole}/checkpoints/update-000009",
            "resume_from_checkpoint {path}: no such folder; give auto, or a checkpoint such as {newest}",
        ),
        *(
            (path, "resume_from_checkpoint {path}: not a checkpoint; give auto, or a checkpoint such as {newest}")
            for path in ("{whole}", "{whole}/model", "{whole}/checkpoints")
        ),
        (
            "{run}/checkpoints/update-000004",
            "resume_from_checkpoint {path}: {run} has no checkpoint to resume from (",
        ),
        ("{whole}/checkpoints/update-000004", "{run} already holds a run"),
    ],
)
def test_a_path_that_cannot_be_resumed_is_one_line(path, line, whole, run, capsys):
    path = path.format(run=run, whole=whole)
    if "no checkpoint" in line:
        shutil.rmtree(run / "checkpoints")
    with pytest.raises(SystemExit):
        cli.main(words(whole.parent / "demos.jsonl", run, "--resume_from_checkpoint", path))
    newest = whole / "checkpoints" / "update-000004"
    assert f"error: {line.format(path=path, run=run, newest=newest)}" in capsys.readouterr().err


def test_no_whole_checkpoint_is_an_error_and_nothing_is_removed(whole, run, capsys):
    flip(run / "checkpoints" / "update-000003")
    tear(run / "checkpoints" / "update-000004")
    names = sorted(run.rglob("*"))
    with pytest.raises(SystemExit):
        cli.main(words(whole.parent / "demos.jsonl", run, "--resume_from_checkpoint"))
    assert "no valid checkpoint left: move" in capsys.readouterr().err
    assert sorted(run.rglob("*")) == names


def test_a_pickle_with_checksums_of_its_own_is_refused_too(whole, run, capsys):
    last = run / "checkpoints" / "update-000004"
    plant_pickle(last)
    (last / "checksums.json").unlink()
    write_checksums(last)
    with pytest.raises(SystemExit):
        cli.main(words(whole.parent / "demos.jsonl", run, "--resume_from_checkpoint"))
    assert f"error: {last}: checksums match but parsing failed (SafetensorError" in capsys.readouterr().err
    assert not PLANTED.exists()


def test_checkpoints_are_in_the_order_of_their_numbers(whole, tmp_path):
    """As text, update-1000000 comes before update-999998."""
    for update in (999_998, 999_999, 1_000_000):
        shutil.copytree(whole / "checkpoints" / "update-000004", tmp_path / "checkpoints" / f"update-{update:06d}")
    (tmp_path / "checkpoints" / "update-000004 (copy)").mkdir()  # a user's
    rotate_checkpoints(tmp_path, 2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["update-000004 (copy)", "update-1000000", "update-999999"]
    newest = tmp_path / "checkpoints" / "update-1000000"
    assert latest_valid_checkpoint(tmp_path) == (newest, [])
    before = tmp_path / "checkpoints" / "update-999999"
    assert quarantine_later(tmp_path, newest) == []
    assert quarantine_later(tmp_path, before) == [f"{newest} was renamed to broken-update-1000000"]


def test_each_file_is_read_by_one_of_the_processes_and_a_fault_is_known_to_all(whole, run, tmp_path):
    last, before = (run / "checkpoints" / f"update-{update:06d}" for update in (4, 3))
    data = (last / "trainer.json").read_bytes()
    (last / "trainer.json").write_bytes(data[:-3] + b" }}")
    launch([str(Path(__file__)), str(run), str(tmp_path)], "ddp")
    seen = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(2)]
    fault = f"{last}: trainer.json holds other bytes than were written"
    assert [(each["path"], each["faults"]) for each in seen] == 2 * [(str(before), [fault])]
    files = [[str(folder / name) for folder in (last, before)] for name in ("state.safetensors", "trainer.json")]
    assert [each["read"] for each in seen] == files, "the first process reads the largest file"


def test_the_next_start_clears_what_killed_processes_left(whole, run, tmp_path):
    """Of a checkpoint and a model half written, of one being replaced, of one being removed; nothing of a user's own."""
    places = [".model-ab12cd34.partial", "checkpoints/.update-000009-ab12cd34.partial", "policies/.update-000001.replaced"]
    for place in (*places, "policies/update-000001", ".mine"):
        (run / place).mkdir(parents=True)
        (run / place / "weights").write_text("x")
    (run / ".config.yaml-0123.partial").write_text("x")
    (run / "model").rename(run / ".model.replaced")
    shutil.copytree(run / "checkpoints/update-000003", run / "checkpoints/update-000002")
    cli.main(words(whole.parent / "demos.jsonl", run, "--resume_from_checkpoint"))
    hidden = {str(path.relative_to(run)) for path in run.rglob(".*")}
    assert hidden == {".mine", ".lock"}
    assert (run / "policies/update-000001/weights").exists()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["update-000003", "update-000004"]
    assert load_file(run / "model" / "model.safetensors").keys() == load_file(whole / "model" / "model.safetensors").keys()


def find_and_note(run: Path, output: Path) -> None:
    """Find the last whole checkpoint with other processes; write what this one found and which files it read."""
    from accelerate import Accelerator

    from align.training.checkpoint import files

    accelerator, read, digest = Accelerator(cpu=True), [], files._digest
    files._digest = lambda path: read.append(str(path)) or digest(path)
    path, faults = latest_valid_checkpoint(run, accelerator)
    found = {"path": str(path), "faults": faults, "read": read}
    (output / f"{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    find_and_note(Path(sys.argv[1]), Path(sys.argv[2]))
