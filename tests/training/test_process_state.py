"""A run leaves the process as it found it: every stage, on every exit, also while a traceback keeps its objects alive."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from align import trl
from align.core import signals
from align.core.signals import Stopped
from align.dpo import DPOConfig
from align.dpo.train import DPOTrainer
from align.model_registry.registry import resolve_model
from align.ppo import PPOConfig
from align.ppo.trainer import PPOTrainer
from align.reward import RewardConfig
from align.reward.train import RewardTrainer
from align.runtime.progress import console
from align.sft import SFTConfig, SFTTrainer
from align.tokenization import template_date
from align.training import engine
from align.training.run_folder import refuse_other_run
from tests.forked import forked

DEMONSTRATIONS = [{"prompt": f"Is {i} odd?", "completion": "Yes." if i % 2 else "No."} for i in range(4)]
RANKINGS = [{"prompt": f"Is {i} odd?", "chosen": "Yes.", "rejected": "Hm."} for i in range(4)]
LIBRARY_THREADS = ("tqdm_monitor",)


class OwnError(Exception):
    """An error of a user's code."""


def lengths(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def maker(stage: str, folder: Path) -> Callable[[], Any]:
    """Return a function that makes a trainer of two updates on a tiny model."""
    common: dict[str, Any] = {"output_dir": folder, "dtype": "float32", "report_to": ["tensorboard"], "learning_rate": 1e-4}
    if stage == "trl":
        return trl_maker(folder)
    if stage == "ppo":
        sizes = {"total_updates": 2, "rollout_batch_size": 4, "max_new_tokens": 4, "num_ppo_epochs": 1}
        return lambda: PPOTrainer("tiny-gpt2", [lengths], ["a", "b", "c", "d"], PPOConfig(**common, **sizes))
    trainer, settings, rows = {
        "sft": (SFTTrainer, SFTConfig, DEMONSTRATIONS),
        "reward": (RewardTrainer, RewardConfig, RANKINGS),
        "dpo": (DPOTrainer, DPOConfig, RANKINGS),
    }[stage]
    return lambda: trainer("tiny-gpt2", rows, settings(**common, batch_size=2))


def trl_maker(folder: Path) -> Callable[[], Any]:
    """Return a function that makes a trainer of `align.trl`, whose models and settings a script has loaded."""
    source = str(resolve_model("tiny-llama"))
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    policies = [AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32) for _ in range(2)]
    scorers = [AutoModelForSequenceClassification.from_pretrained(source, num_labels=1) for _ in range(2)]
    prompts = Dataset.from_dict({"input_ids": [tokenizer(f"Is {i} odd?").input_ids for i in range(8)]})
    sizes = {"per_device_train_batch_size": 4, "total_episodes": 8, "response_length": 4, "num_ppo_epochs": 1}
    args = trl.PPOConfig(output_dir=str(folder), report_to="none", num_sample_generations=0, **sizes)
    return lambda: trl.PPOTrainer(args, tokenizer, policies[0], policies[1], scorers[0].float(), prompts, scorers[1].float())


def process_state(folder: Path, foreign: frozenset[str] = frozenset()) -> dict[str, object]:
    """What a run may change in the process, by name. `foreign` names threads of other tests, which may end at any time."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    opened = [str(link.readlink()) for link in links if link.is_symlink()]  # the one of this listing has gone
    return {
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
        "wake-up descriptor": wakeup,
        "threads": {thread.name for thread in threading.enumerate()} - {*LIBRARY_THREADS} - foreign,
        "files of the run": [path for path in opened if path.startswith(str(folder))],
        "pipes": len([path for path in opened if path.startswith("pipe:")]),
        "environment": dict(os.environ),
        "random state": torch.get_rng_state().tolist(),
        "gradients": torch.is_grad_enabled(),
        "date of templates": template_date(),
        "state of accelerate": id(AcceleratorState._shared_state),
        "exception hook of threads": threading.excepthook,
    }


def is_free(folder: Path) -> bool:
    """Whether another process may run in the folder."""
    process = forked(refuse_other_run, folder)
    process.join()
    return process.exitcode == 0


def fail(step: Callable[[], Any]) -> Any:
    raise OwnError


def interrupt(step: Callable[[], Any]) -> Any:
    os.kill(os.getpid(), signal.SIGINT)
    return step()


def interrupt_twice(step: Callable[[], Any]) -> Any:
    os.kill(os.getpid(), signal.SIGINT)
    return interrupt(step)


EXITS: dict[str, tuple[Any, type[BaseException] | None]] = {
    "end": (lambda step: step(), None),
    "error": (fail, OwnError),
    "Ctrl-C": (interrupt, Stopped),
    "Ctrl-C twice": (interrupt_twice, KeyboardInterrupt),
    "not used": (None, None),
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory, align_cache) -> None:
    """Libraries change the process once, when a run imports them."""
    maker("ppo", tmp_path_factory.mktemp("warm") / "run")().train()


@pytest.mark.parametrize("exit_name", EXITS)
@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo", "trl"])
def test_a_run_leaves_the_process_as_it_was(stage, exit_name, warm, tmp_path, monkeypatch):
    act, error = EXITS[exit_name]
    folder, original = tmp_path / "run", engine.TrainEngine.step
    make = maker(stage, folder)
    monkeypatch.setattr(signals, "SECOND_CTRL_C", -1.0)  # the second one counts at once
    foreign = frozenset(thread.name for thread in threading.enumerate())
    before = process_state(folder, foreign)
    trainer = make()
    assert process_state(folder, foreign) == before, "after the trainer was made"
    kept: list[BaseException] = []
    if act:
        monkeypatch.setattr(
            engine.TrainEngine, "step", lambda self, *values, **named: act(lambda: original(self, *values, **named))
        )
        try:
            trainer.train()
        except BaseException as caught:  # as an interactive session keeps the last traceback, with the run's generator
            kept.append(caught)
        assert [type(caught) for caught in kept] == ([error] if error else []), kept
    after = process_state(folder, foreign)
    assert {name: value for name, value in after.items() if value != before[name]} == {}
    assert is_free(folder)
    with Progress(console=console, disable=False):  # rich allows one at a time
        pass
    if error is Stopped:
        (run_folder,) = {path.parent.parent for path in folder.rglob("checkpoints/update-*")}
        assert is_free(run_folder), "the stopped run's folder, which holds a checkpoint"
