import json

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from align.core.errors import UserError
from align.ppo import PPOConfig, PPOTrainer
from tests.settings import run_settings

PROMPTS = ["red", "green, blue", "one", "two"]


def long(prompts, responses):
    return [float(len(response)) for response in responses]


class Recorder(TrainerCallback):
    """Writes down each event with its step, and decides as it is told."""

    def __init__(self, save_at=(), stop_at=0):
        self.events, self.save_at, self.stop_at = [], save_at, stop_at

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append(("begin", state.global_step))
        self.seen = {name for name, value in kwargs.items() if value is not None}
        self.args, self.max_steps = args, state.max_steps

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(("step", state.global_step))
        control.should_save = control.should_save or state.global_step in self.save_at
        control.should_training_stop = state.global_step == self.stop_at

    def on_log(self, args, state, control, logs, **kwargs):
        self.events.append(("log", state.global_step))
        self.logs = logs

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append(("end", state.global_step))


class Counter(TrainerCallback, ExportableState):
    def __init__(self):
        self.count = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

    def state(self):
        return {"args": {}, "attributes": {"count": self.count}}


@pytest.fixture
def trainer(sharp_folders, tmp_path):
    def made(callbacks, **settings):
        given = run_settings(tmp_path / "run", total_updates=6)
        given |= {"rollout_batch_size": 2, "max_new_tokens": 4, "num_ppo_epochs": 1}
        config = PPOConfig(**(given | settings))
        return PPOTrainer(sharp_folders["tiny-gpt2"], [long], PROMPTS, config, callbacks=callbacks)

    return made


def test_events_come_as_transformers_fires_them(trainer, capsys):
    """As TRL's PPO trainer in a run of 6 updates with save_steps 4: the last update is saved too."""
    recorder = Recorder()
    made = trainer([recorder], save_steps=4)
    made.train()
    assert "events that never fire" not in " ".join(capsys.readouterr().err.split())
    events = [("begin", 0)]
    for step in range(1, 7):
        events += [("log", step), ("step", step)] + [("save", step)] * (step in (4, 6))
    assert recorder.events == [*events, ("end", 6)]
    assert {"model", "processing_class", "optimizer"} <= recorder.seen
    assert (recorder.max_steps, recorder.args.save_steps) == (6, 4)
    last = json.loads((made.run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert recorder.logs["reward/mean"] == pytest.approx(last["reward/mean"], rel=1e-6)
    state = TrainerState.load_from_json(made.run.folder / "trainer_state.json")
    assert (state.global_step, state.max_steps, state.epoch) == (6, 6, 3.0)
    assert [logs["step"] for logs in state.log_history] == list(range(1, 7))
    assert sorted(path.name for path in (made.run.folder / "checkpoints").iterdir()) == ["update-000004", "update-000006"]


def test_training_begins_before_the_first_evaluation_with_gradients_and_before_any_file(sharp_folders, tmp_path):
    folder, events = tmp_path / "run", []

    class Begin(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            events.append(("begin", torch.is_grad_enabled(), folder.exists()))

    def score(prompts, responses):
        events.append(("score", torch.is_grad_enabled(), folder.exists()))
        return long(prompts, responses)

    settings = run_settings(total_updates=1, rollout_batch_size=2, max_new_tokens=4)
    config = PPOConfig(output_dir=str(folder), **settings)
    PPOTrainer(sharp_folders["tiny-gpt2"], [score], PROMPTS, config, PROMPTS[:2], callbacks=[Begin()]).train()
    assert events[:2] == [("begin", True, False), ("score", False, False)]
    assert [event[0] for event in events].count("begin") == 1


def steps_logged(folder):
    return [logs["step"] for logs in TrainerState.load_from_json(folder / "trainer_state.json").log_history]


def test_a_callback_saves_and_stops_and_a_resumed_run_has_its_state(trainer, tmp_path):
    first, recorder = Counter(), Recorder(save_at=(2,), stop_at=3)
    made = trainer([first, recorder])
    folder = made.train()
    assert first.count == 3
    assert recorder.events[-3:] == [("log", 3), ("step", 3), ("end", 3)]
    assert [path.name for path in (made.run.folder / "checkpoints").iterdir()] == ["update-000002"]
    assert (folder / "model.safetensors").exists()
    second, recorder = Counter(), Recorder()
    made = trainer([second, recorder], save_steps=2, resume_from_checkpoint=True)
    made.train()
    assert recorder.events[:2] == [("begin", 2), ("log", 3)]
    assert steps_logged(made.run.folder) == list(range(1, 7))
    assert second.count == 6  # 2 in the checkpoint, although the first run counted a third update
    (made.run.folder / "trainer_state.json").write_text("[]")  # written for others, not read
    third = Counter()
    trainer([third], save_steps=2, resume_from_checkpoint=True, total_updates=7).train()
    assert third.count == 7


def test_runs_with_and_without_callbacks_and_other_runs_continue_from_a_checkpoint(trainer, tmp_path):
    trainer([Recorder(stop_at=2)], save_steps=2).train()
    counter = Counter()
    source = str(tmp_path / "run" / "checkpoints" / "update-000002")
    trainer([counter], output_dir=str(tmp_path / "other"), resume_from_checkpoint=source).train()
    assert steps_logged(tmp_path / "other") == list(range(1, 7))
    assert counter.count == 4
    trainer([], save_steps=2, resume_from_checkpoint=True, total_updates=4).train()
    counter = Counter()
    trainer([counter], save_steps=2, resume_from_checkpoint=True).train()
    assert counter.count == 2  # updates 5 and 6


class Unseen(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        raise AssertionError("no run of PPO fires it")

    def on_step_begin(self, args, state, control, **kwargs):
        raise AssertionError("no run of PPO fires it")


@pytest.mark.parametrize(
    ("callbacks", "line"),
    [
        (Recorder(), r"callbacks: must be a list, not Recorder; give callbacks=\[...\]"),
        (Recorder, r"callbacks: must be a list, not type; give callbacks=\[...\]"),
        ([EarlyStoppingCallback], r"callbacks: EarlyStoppingCallback needs on_evaluate"),
        ([object()], r"callbacks: object is no TrainerCallback of transformers; derive it from that class"),
        (
            [EarlyStoppingCallback(3)],
            r"callbacks: EarlyStoppingCallback needs on_evaluate, which is never called; set selec",
        ),
    ],
)
def test_callbacks_that_cannot_work_are_refused(callbacks, line):
    with pytest.raises(UserError, match=line):
        PPOTrainer("tiny-gpt2", [long], PROMPTS, PPOConfig(), callbacks=callbacks)


def test_events_that_never_fire_are_named(trainer, capsys):
    trainer([Unseen()]).train()
    line = "warning: callbacks: events that never fire: Unseen.on_step_begin, Unseen.on_evaluate; evaluations are in on_log"
    assert line in " ".join(capsys.readouterr().err.split())
