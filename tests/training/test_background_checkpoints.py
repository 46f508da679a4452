"""Checkpoints that a thread writes while training goes on: what is in them, who waits for them, and how they fail."""

import resource
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from align import cli
from align.core.errors import UserError
from align.core.signals import Stopped
from align.sft import SFTConfig
from align.training import checkpoint, memory
from align.training.checkpoint import Checkpoint
from align.training.checkpoint.files import integrity_error
from align.training.engine import TrainEngine
from align.training.run import Run
from tests.forked import forked
from tests.launch.compared import metrics
from tests.training.test_resume import options
from tests.training.toy_modules import Kept


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that keeps whoever syncs a checkpoint's file waiting until this is set."""
    ready, drop_page_cache = threading.Event(), checkpoint.drop_page_cache

    def wait_for_disk(path: Path) -> None:
        assert ready.wait(60)
        drop_page_cache(path)

    monkeypatch.setattr(checkpoint, "drop_page_cache", wait_for_disk)
    return ready


def run_in(folder: Path, **settings: object) -> tuple[Run, TrainEngine]:
    """A run of 65,536 weights that saves in the background: 786 kB a checkpoint."""
    given = {
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "dtype": "float32",
        "report_to": ["none"],
    }
    config = SFTConfig(output_dir=str(folder), checkpoint_in_background=True, **(given | settings))  # type: ignore[arg-type]
    torch.manual_seed(0)
    run = Run(config, "sft")
    return run, TrainEngine(run, nn.Linear(2**16, 1, bias=False), 9)


def step(engine: TrainEngine) -> None:
    for weight in engine.trainable.values():
        weight.grad = torch.ones_like(weight)
    engine.step(1)


def test_training_goes_on_and_the_checkpoint_holds_what_was(tmp_path, disk):
    run, engine = run_in(tmp_path)
    step(engine)
    saved = {name: value.clone() for name, value in engine.state()[0].items()}
    kl = Kept({"beta": [0.1]})
    Checkpoint(run, engine, {"kl": kl}).save(1)
    step(engine)
    kl.state["beta"].append(0.2)
    run.background.check()  # does not wait
    assert not list(tmp_path.glob("checkpoints/update-*"))
    disk.set()
    run.close()
    again, resumed = run_in(tmp_path, resume_from_checkpoint=True)
    restored = Kept()
    assert Checkpoint(again, resumed, {"kl": restored}).load() == 1
    assert restored.state == {"beta": [0.1]}
    found = resumed.state()[0]
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    assert not torch.equal(engine.state()[0]["master/weight"], saved["master/weight"])


def test_a_run_that_is_asked_to_stop_waits_for_its_checkpoint(tmp_path, disk):
    run, engine = run_in(tmp_path)
    threading.Timer(0.3, disk.set).start()
    updates = run.updates(1, 5, Checkpoint(run, engine, {}))
    assert next(updates) == 1
    run.stop.signal = "SIGTERM"
    with pytest.raises(Stopped, match="after update 1"):
        next(updates)
    assert integrity_error(tmp_path / "checkpoints" / "update-000001") == ""


def test_the_next_save_waits_for_the_one_before(tmp_path, disk):
    run, engine = run_in(tmp_path, save_total_limit=0)
    Checkpoint(run, engine, {}).save(1)
    assert not list(tmp_path.glob("checkpoints/update-*"))
    threading.Timer(0.3, disk.set).start()
    Checkpoint(run, engine, {}).save(2)
    assert (tmp_path / "checkpoints" / "update-000001").exists()
    run.background.finish()
    assert [integrity_error(path) for path in sorted(tmp_path.glob("checkpoints/*"))] == ["", ""]


def test_an_error_of_the_thread_ends_the_run_and_leaves_the_checkpoint_before(tmp_path):
    run, engine = run_in(tmp_path, save_steps=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Limited(Checkpoint):
        def save(self, update: int, states: Mapping[str, Any] | None = None) -> None:
            super().save(update, states)
            if update == 1:
                run.background.finish()
                resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))

    updates = run.updates(1, 10**6, Limited(run, engine, {}))
    try:
        assert [next(updates) for _ in range(3)] == [1, 2, 3]
        run.config.save_steps = 0
        with pytest.raises(UserError) as caught:
            deque((time.sleep(0.01) for _ in zip(updates, range(1000), strict=False)), maxlen=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    target = tmp_path / "checkpoints" / "update-000002"
    assert str(caught.value).startswith(f"{target}: cannot be written (")
    assert str(caught.value).endswith("nothing was changed there")
    assert [path.name for path in target.parent.iterdir()] == ["update-000001"]
    assert integrity_error(target.with_name("update-000001")) == ""


def stuck_in_second(words: list[str]) -> None:
    """Run a command whose second checkpoint never gets onto the disk."""
    drop_page_cache, seen = checkpoint.drop_page_cache, set[Path]()

    def stick(path: Path) -> None:
        seen.add(path.parent)
        while len(seen) > 1:
            time.sleep(1)
        drop_page_cache(path)

    checkpoint.drop_page_cache = stick
    cli.main(words)


def test_killed_while_a_checkpoint_is_written_a_run_goes_on_to_the_same_bits(tmp_path, monkeypatch, capsys):
    """The thread is stuck, training goes on until the next save; then the process is killed."""
    monkeypatch.chdir(Path(__file__).parents[2])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ["--checkpoint_in_background", "true"]
    process = forked(stuck_in_second, ["sft", *options("sft", killed, *more)])
    deadline = time.monotonic() + 60
    written = killed / "metrics.jsonl"
    while not (written.exists() and '"update": 6,' in written.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in killed.glob("checkpoints/update-*")] == ["update-000002"]
    assert len(list(killed.glob("checkpoints/.update-000004*"))) == 1
    cli.main(["sft", *options("sft", killed, *more, "--resume_from_checkpoint", "true")])
    assert f"resumed from {killed / 'checkpoints' / 'update-000002'}" in capsys.readouterr().err
    cli.main(["sft", *options("sft", whole)])  # in the foreground
    assert metrics(killed) == metrics(whole)
    for path in whole.rglob("*.safetensors"):
        assert (killed / path.relative_to(whole)).read_bytes() == path.read_bytes()
    assert {path.name for path in killed.rglob(".*")} == {".lock"}


@pytest.mark.parametrize(("optimizer", "numbers"), [("adamw", 3 * 30), ("adafactor", 30 + 5 + 6)])
def test_the_copy_is_in_the_estimate(make_run, monkeypatch, optimizer, numbers):
    """Masters and the optimizer's state of a matrix of 5 by 6, and 100 bytes of something else."""
    monkeypatch.setattr(memory, "ALWAYS_FITS_BYTES", 0)
    held = {}
    for background in (False, True):
        run = make_run(SFTConfig, "sft", optimizer=optimizer, checkpoint_in_background=background)
        run.memory.start_bytes = 0
        matrix = nn.Linear(6, 5, bias=False)
        run.memory.check(matrix, in_checkpoints=100)
        held[background] = run.memory.resident_bytes
    assert held[True] - held[False] == 4 * numbers + 100
