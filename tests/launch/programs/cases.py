"""What two processes of a launch do, suffer or do not see, in a small run or in PPO: a function for each case.

Usage: cases.py NAME FOLDER [WORD...]: each process writes what the function returns to RANK.json in FOLDER.
"""

import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import distributed_c10d as c10d
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from align import cli
from align.batches.micro_batches import MicroBatch
from align.core.errors import UserError
from align.core.launch import one_line_errors, run_stage
from align.model_registry.registry import resolve_model
from align.models.heads import RewardModel, ScalarHead
from align.models.loading import load
from align.ppo import PPOConfig, PPOTrainer, train
from align.ppo.extensions import Extension
from align.reward import RewardConfig
from align.runtime.distributed import gather_rows, limit_collectives, run_on_all, run_on_main
from align.sft import SFTConfig
from align.training.checkpoint.checkpoint import Checkpoint
from align.training.run import Run
from align.training.setup import build_engine
from tests.launch.launcher import ppo_words
from tests.launch.programs.in_turn import avoid_compiling
from tests.settings import run_settings
from tests.training.toy_modules import Kept, accumulate

RANK = int(os.environ.get("RANK", "0"))
PLAIN = run_settings()
PPO = {**PLAIN, "rollout_batch_size": 4, "num_ppo_epochs": 1, "max_new_tokens": 4, "collective_timeout": 60}


def small_run(folder: Path, module: nn.Module, updates: int, **settings: Any) -> tuple[Run, Any]:
    """A run in a folder, and what trains `module` there for so many updates."""
    run = Run(SFTConfig(output_dir=str(folder), **PLAIN, **settings), "sft")
    return run, build_engine(run, module, updates)


def same_start(folder: Path) -> list[Any]:
    """Draw a reward model with an adapter from another seed on each rank, and write it before and under the engine.

    Returns the ranks that this process hears from, the number of processes and the device.
    """
    run = Run(RewardConfig(model="tiny-llama", lora_r=4, output_dir=str(folder / "run"), **PLAIN), "reward")
    torch.manual_seed(RANK)
    loaded = load(run.config, torch.float32, adapter="reward")
    model = RewardModel(loaded.backbone, ScalarHead(loaded.backbone.hidden_size), loaded.adapter)
    drawn = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    save_file(drawn, folder / f"drawn-{RANK}.safetensors")
    trained = build_engine(run, model, total_steps=1).trainable
    if run.accelerator.state.deepspeed_plugin is not None:
        from deepspeed.utils import safe_get_full_fp32_param

        trained = {name: safe_get_full_fp32_param(weight) for name, weight in trained.items()}  # gathered from both shards
    save_file({name: weight.detach() for name, weight in trained.items()}, folder / f"{RANK}.safetensors")
    # Rows of other lengths, some empty, all of them on one process: 0, 2 and 4 on the first, 1 and 3 on the second.
    rows = [torch.arange(2.0 * length).reshape(2, length) - number for number, length in enumerate((3, 0, 1, 5, 2))]
    everywhere = dict(gather_rows([(number, row) for number, row in enumerate(rows) if number % 2 == RANK], run.accelerator))
    assert all(torch.equal(everywhere[number], row) for number, row in enumerate(rows))
    return [gather_rows([RANK], run.accelerator), run.accelerator.num_processes, run.accelerator.device.type]


def two_ends(folder: Path) -> dict[str, Any]:
    """Fail in a piece of work that both processes enter, in each way that one can; returns what each raised."""
    run, engine = small_run(folder / "run", nn.Linear(4, 4), 1, collective_timeout=60)
    results: dict[str, Any] = {}

    def fail(error: Exception, on: int) -> Callable[[], str]:
        def work() -> str:
            if on == RANK:
                raise error
            return "done"

        return work

    def case(name: str, work: Callable[[], object]) -> None:
        try:
            results[name] = work()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"

    case("main, a mistake", lambda: run_on_main(fail(UserError("no such file"), 0), run.accelerator))
    case("main, a bug", lambda: run_on_main(fail(KeyError("mean"), 0), run.accelerator))
    case("main, well", lambda: run_on_main(fail(KeyError("mean"), 1), run.accelerator))
    case("all, a mistake", lambda: run_on_all(fail(UserError("no such file"), 1), run.accelerator))
    case("all, a bug", lambda: run_on_all(fail(OSError(5, "Input/output error"), 1), run.accelerator))
    case("all, well", lambda: run_on_all(lambda: RANK, run.accelerator))
    with patch.object(run.memory, "free", lambda: 1_000 if RANK == 1 else 10**15):
        case("memory", lambda: run.memory.check(nn.Linear(4096, 4100)))
    with patch("align.training.run_folder.take_lock", lambda _: fail(UserError("another run writes there"), 0)()):
        case("open", Run(SFTConfig(output_dir=str(folder / "taken"), **PLAIN), "sft").open)

    checkpoint = Checkpoint(run, engine, {})
    with patch.object(engine, "state", fail(MemoryError("no room for the copy"), 1) if RANK == 1 else engine.state):
        case("save", lambda: checkpoint.save(1))
    checkpoint.save(1)
    run.checkpoint = run.folder / "checkpoints" / "update-000001"
    unreadable = lambda *_: fail(OSError(5, "Input/output error"), 1)()  # noqa: E731
    with patch.object(engine, "load_state", unreadable if RANK == 1 else engine.load_state):
        case("load", checkpoint.load)
    case("load again", checkpoint.load)
    run.close()
    return results


def own_rewards(folder: Path) -> dict[str, Any]:
    """PPO with reward functions that differ from call to call, or fail; returns what this process saw."""
    drawn, calls, evaluators = random.Random(RANK), {"noisy": 0, "judge": 0}, []

    def noisy(prompts, responses):
        calls["noisy"] += 1
        return [drawn.gauss(0, 1) for _ in responses]

    def judge(prompts, responses):
        calls["judge"] += 1
        return [drawn.gauss(0, 1) for _ in responses]

    def failing(prompts, responses):
        if RANK == 0:
            raise ValueError("the service is down")
        return [0.0] * len(responses)

    class SeenEvaluator(train.Evaluator):
        def __init__(self, *values, **named):
            super().__init__(*values, **named)
            evaluators.append(self)

    def trainer(function):
        config = PPOConfig(output_dir=str(folder / function.__name__), total_updates=3, eval_steps=1, **PPO)
        words = ["red", "green", "blue", "one"]
        return PPOTrainer("tiny-gpt2", [function], words, config, words, selection_reward_model=judge)

    with patch.object(train, "Evaluator", SeenEvaluator):
        made = trainer(noisy)
        made.train()
    states = {"selection": evaluators[0].selection, "drift": evaluators[0].drift, "judge": made.setup.extensions[-1]}
    seen = {name: part.state_dict() for name, part in states.items()} | {"calls": dict(calls)}
    try:
        trainer(failing).train()
    except UserError as error:
        seen["failing"] = str(error)
    return seen


class StopsOnOne(Extension):
    """On the last process alone: wants the end after update 2."""

    def __init__(self):
        self.updates = 0

    @property
    def should_stop(self):
        return self.updates == 2 and int(os.environ.get("WORLD_SIZE", "1")) - 1 == RANK

    def after_update(self, update, experience):
        self.updates = update


def stop_on_one(folder: Path) -> str:
    """PPO that one process wants to stop; returns the folder of the model."""
    stops = f"{__name__ if __name__ != '__main__' else 'tests.launch.programs.cases'}:StopsOnOne"
    config = PPOConfig(output_dir=str(folder / "run"), total_updates=5, extensions=[stops], **PPO)
    return str(PPOTrainer("tiny-gpt2", [constant], ["red", "green", "blue", "one"], config).train())


def constant(prompts, responses):
    return [1.0] * len(responses)


class Wishes(TrainerCallback):
    """On the last process alone: wants a checkpoint after update 2, and the end after update 3."""

    def __init__(self):
        self.events, self.wishes = [], int(os.environ.get("WORLD_SIZE", "1")) - 1 == RANK

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(state.global_step)
        control.should_save = self.wishes and state.global_step == 2
        control.should_training_stop = self.wishes and state.global_step == 3

    def on_save(self, args, state, control, **kwargs):
        self.events.append("save")

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")


def given_objects(folder: Path) -> dict[str, Any]:
    """PPO with models, an optimizer and callbacks in memory; returns what the callbacks saw and a part of the value head."""
    source, callback = resolve_model("tiny-llama"), Wishes()

    def classifier(seed):
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)

    policy, reference = (AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32) for _ in range(2))
    value_model = classifier(RANK)  # another head on each process
    with torch.no_grad():
        for weight in reference.parameters():
            weight.mul_(1.1)
    optimizer = torch.optim.AdamW([*policy.parameters(), *value_model.parameters()], lr=1e-3, weight_decay=0.0)
    trainer = PPOTrainer(
        policy,
        [classifier(7)],
        ["red", "green, blue", "one"],
        PPOConfig(output_dir=str(folder / "run"), total_updates=5, missing_eos_score=None, **PPO),
        tokenizer=AutoTokenizer.from_pretrained(source),
        reference=reference,
        value_model=value_model,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2)),
        callbacks=[callback],
    )
    trainer.train()
    return {"events": callback.events, "head": value_model.score.weight.detach()[0, :4].tolist()}


def stale_disk(folder: Path) -> list[Any]:
    """PPO on a shared disk that does not show the second process what was just written, as NFS may for a minute.

    Returns whether the fitted value head was restored in each resumed run, and the code and line with which each run ended.
    """
    exists, restore, restored, ended, told = Path.exists, Checkpoint.load, [], [], StringIO()
    more = [
        "--validation_prompts",
        "data/prompts_validation.jsonl",
        "--value_fit",
        "every",
        "--collective_timeout",
        "60",
    ]

    def load_and_note(checkpoint: Checkpoint) -> int:
        done = restore(checkpoint)
        restored.append(checkpoint.stateful["value_regression"].moments is not None)
        return done

    for updates, resume, hidden in ((1, "false", ""), (2, "true", "value_regression.safetensors"), (2, "true", "model")):

        def stale(path: Path, *, name: str = hidden, **named: bool) -> bool:
            return exists(path, **named) and not (RANK == 1 and path.name == name and folder in path.parents)

        words = ppo_words("tiny-gpt2", folder / "run", updates, "--resume_from_checkpoint", resume, *more)
        with patch.object(Checkpoint, "load", load_and_note), patch.object(Path, "exists", stale), redirect_stderr(told):
            try:
                cli.main(["ppo", *words])
                ended.append(0)
            except SystemExit as error:
                (line,) = {line for line in told.getvalue().splitlines() if "error: " in line}
                ended += [error.code, line]
    return [restored, ended]


def failing_save(folder: Path, fails: str) -> str:
    """Save a state twice, the second time with one process that cannot write; returns the error."""
    torch.manual_seed(0)
    run, engine = small_run(folder / "run", nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), 1)
    checkpoint, message = Checkpoint(run, engine, {"sums": Kept([])}), ""
    checkpoint.save(1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if int(fails) == RANK:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        checkpoint.save(2)
    except UserError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    run.close()
    return message


RATES = {"learning_rate": 0.1, "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "weight_decay": 0.5}


def spare_weight(folder: Path, updates: int = 4, resume: bool = True) -> None:
    """Train a module of which one weight never gets a gradient, from the last checkpoint to an update, and save there."""
    module = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("used", "spare")})
    for weight in module.parameters():
        nn.init.ones_(weight)
    run, engine = small_run(folder, module, updates, resume_from_checkpoint=resume, max_grad_norm=0.0, **RATES)
    computing = getattr(engine.module, "module", engine.module)
    rows, share = torch.arange(8.0).reshape(2, 4) / 8, 1 / run.accelerator.num_processes
    checkpoint = Checkpoint(run, engine, {})
    for update in range(checkpoint.load() + 1, updates + 1):
        accumulate(engine, [MicroBatch([[0]])], lambda _: (computing["used"](rows).tanh().square().sum() * share, {}))
        engine.step(update)
    checkpoint.save(updates)
    run.close()


def stopped_process(folder: Path, timeout: str) -> None:
    """Train a small module; the second process stops itself (SIGSTOP) before the last update.

    Each process writes the timeouts of its process groups, in seconds, before that update.
    """
    _, engine = small_run(folder / "run", nn.Linear(4, 4), 2, collective_timeout=float(timeout))
    torch.distributed.new_group([0, 1])
    limit_collectives()
    rows = torch.ones(2, 4)
    for update in (1, 2):
        if update == 2:
            groups = c10d._world.pg_names
            write(folder, [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in groups])
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
        accumulate(engine, [MicroBatch([[0]])], lambda _: (engine.module(rows).square().sum(), {}))
        engine.step(update)


def one_signal(folder: Path, asked: str) -> None:
    """Send the process of that rank SIGTERM before the first update, while the other one waits for it."""

    def stage(config: SFTConfig) -> None:
        run = Run(config, "sft")
        if run.accelerator.process_index == int(asked):
            os.kill(os.getpid(), signal.SIGTERM)
        run.accelerator.wait_for_everyone()

    run_stage(SFTConfig, stage, ["--dtype", "float32", "--report_to", "none", "--output_dir", str(folder / "run")])


def write(folder: Path, value: Any) -> None:
    """Write a value to this process's file, whole."""
    part = folder / f"{RANK}.part"
    part.write_text(json.dumps(value))
    part.rename(folder / f"{RANK}.json")


if __name__ == "__main__":
    avoid_compiling()
    name, where, *words = sys.argv[1:]
    with one_line_errors():
        write(Path(where), globals()[name](Path(where), *words))
    torch.distributed.destroy_process_group()
