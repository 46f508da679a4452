"""Kills and resumes runs, and checks that the results equal the bytes of an uninterrupted run. `make soak` runs this.

A run is killed with SIGKILL, half of the time after a random delay and half of the time at the n-th operation that changes
a file (open for writing, rename, remove). Some kills therefore interrupt the writing of a checkpoint. The run is restarted
with `--resume_from_checkpoint auto` and killed again, until it finishes. Its model, its metrics (except times) and its last
checkpoint are then compared with those of an uninterrupted run.

In a run with two processes, one process is killed, or after a delay also both at once. The remaining process must exit
within 60 s.

The uninterrupted run is a separate program. Runs to be killed are forked from this process, which has imported their
modules, so that 30 kills take a tenth of the time. Runs with several processes get the environment variables of
`accelerate launch`.
"""

import importlib
import multiprocessing.connection
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from align import cli
from tests.launch.compared import metrics
from tests.launch.launcher import launch, launched, variables
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ("align.sft", "align.reward", "align.extras.rules", "align.ppo", "align.dpo")
LOST_SECONDS = 60.0
"""Time within which the other processes of a run must exit after a process was killed."""
COMMON = "--dtype float32 --report_to none --overlong truncate --max_prompt_tokens 64 --learning_rate 1e-3 --save_steps 2"
COMMON += " --resume_from_checkpoint auto"
SFT = "--train_data data/demonstrations_heldout.jsonl --batch_size 6 --max_response_tokens 16 --eval_steps 4"
SFT += " --validation_data data/demonstrations_heldout.jsonl"
REWARD = "--train_data data/rankings_heldout.jsonl --batch_size 4 --max_response_tokens 16 --eval_steps 4"
REWARD += " --validation_data data/rankings_heldout.jsonl --demonstrations data/demonstrations_heldout.jsonl"
PPO = "--validation_prompts data/prompts_validation.jsonl --reward_functions align.ppo.toy_rewards:share_of_e"
PPO += " --total_updates 9 --rollout_batch_size 4 --num_ppo_epochs 2 --num_mini_batches 2 --max_new_tokens 6"
PPO += " --missing_eos_score none --eval_steps 4"
RULES = "--train_data data/rule_judgments.jsonl --batch_size 6 --max_response_tokens 16 --validation_split 0.9"
RULES += " --rules forms/rules/plain-style.yaml forms/rules/sparrow-dialogue.yaml"
LLAMA, T5, LORA = "--model tiny-llama", "--model tiny-t5", "--model tiny-llama --lora_r 4"
VARIANTS = {
    "sft": ("sft", f"{LLAMA} {SFT}"),
    "sft-t5": ("sft", f"{T5} {SFT}"),
    "sft-lora": ("sft", f"{LORA} {SFT}"),
    "sft-adafactor": ("sft", f"{LLAMA} {SFT} --optimizer adafactor"),
    "reward": ("reward", f"{LLAMA} {REWARD}"),
    "reward-t5": ("reward", f"{T5} {REWARD}"),
    "reward-lora": ("reward", f"{LORA} {REWARD}"),
    "ppo": ("ppo", f"{LLAMA} {PPO}"),
    "ppo-t5": ("ppo", f"{T5} {PPO}"),
    "ppo-lora": ("ppo", f"{LORA} {PPO}"),
    "ppo-bfloat16": ("ppo", f"{LLAMA} {PPO} --dtype bfloat16"),
    "ppo-adafactor": ("ppo", f"{LLAMA} {PPO} --optimizer adafactor"),
    "ppo-critic": ("ppo", f"{LLAMA} {PPO} --critic separate --value_learning_rate 2e-3 --critic_warmup 1"),
    "ppo-lora-critic": ("ppo", f"{LORA} {PPO} --critic separate"),
    "ppo-ptx": ("ppo", f"{LLAMA} {PPO} --ptx.data data/demonstrations_heldout.jsonl"),
    "ppo-kl": ("ppo", f"{LLAMA} {PPO} --kl_target 1"),
    "ppo-samples": ("ppo", f"{LLAMA} {PPO} --samples_per_prompt 2 --advantage_estimator rloo"),
    "ppo-ema": ("ppo", f"{LLAMA} {PPO} --ema_decay 0.9"),
    "ppo-ensemble": ("ppo", f"{LLAMA} {PPO} --reward_model {{reward-a}} {{reward-b}} --reward_ensemble uwo"),
    "ppo-rules": ("ppo", f"{LLAMA} {PPO} --rules.model {{rules}}"),
    "rules": ("rules", f"{LLAMA} {RULES}"),
    "dpo": ("dpo", f"{LLAMA} --train_data data/rankings_heldout.jsonl --batch_size 4 --max_response_tokens 16"),
}
PREPARED = {
    "reward-a": f"reward {LLAMA} {REWARD} --seed 1",
    "reward-b": f"reward {LLAMA} {REWARD} --seed 2",
    "rules": f"rules {LLAMA} {RULES}",
}
"""Models that variants name in braces. Created once before the runs."""
LAUNCHED = {
    "sft-two": ("sft", "cpu2"),
    "sft-zero3": ("sft", "zero3"),
    "reward-zero1": ("reward", "zero1"),
    "reward-lora-zero2": ("reward-lora", "zero2"),
    "ppo-two": ("ppo", "cpu2"),
    "ppo-zero2": ("ppo", "zero2"),
    "ppo-zero3": ("ppo-critic", "zero3"),
    "ppo-offload": ("ppo-ptx", "zero3-offload"),
}
"""Variants in two processes -> (variant, launcher's file in configs/accelerate)."""
NAMES = (*VARIANTS, *LAUNCHED)
PROCESSES = 2


class Killed(NamedTuple):
    """Condition that kills a run: the number of a file operation in a process, or the time since the start.

    Zero means no kill. `alone` tells whether the time kills only this process or all processes at once.
    """

    process: int = 0
    operation: int = 0
    seconds: float = 0.0
    alone: bool = True


class _Operations:
    """Counts a process's operations on the files of its run, and kills the process at operation number `fatal`."""

    def __init__(self, fatal: int, folder: Path) -> None:
        self.fatal, self.folder, self.count = fatal, str(folder), 0
        sys.addaudithook(self._watch)

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            changes = isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        else:
            changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.chmod")
        if changes and str(arguments[0]).startswith(self.folder):
            self.count += 1
            if self.count == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)


def _run(words: Sequence[str], folder: Path, rank: int, variables: dict[str, str], fatal: int) -> None:
    """Run a stage in a forked process. Its stderr goes to a file next to its folder."""
    os.dup2(os.open(f"{folder}.told-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
    os.environ.update(variables)
    operations = _Operations(fatal, folder)
    try:
        cli.main([*words, "--output_dir", str(folder)])
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    Path(f"{folder}.operations-{rank}").write_text(str(operations.count))


def run_forked(
    words: Sequence[str], folder: Path, environments: Sequence[dict[str, str]], killed: Killed
) -> tuple[int, str]:
    """Run a stage in forked processes, each with its environment variables. One or all of them may be killed.

    Returns:
        An exit code and the stderr output. The code is 0 if all processes finished, -9 if one was killed and all have
        exited, or another code otherwise.
    """
    for name in (*IMPORTED, *(["deepspeed"] if "ACCELERATE_USE_DEEPSPEED" in environments[0] else [])):
        importlib.import_module(name)
    port = {"MASTER_PORT": str(free_port())} if len(environments) > 1 else {}
    fork = multiprocessing.get_context("fork").Process
    processes = [
        fork(target=_run, args=(words, folder, rank, each | port, killed.operation * (rank == killed.process)))
        for rank, each in enumerate(environments)
    ]
    for process in processes:
        process.start()
    return _end(processes, killed), "\n".join(Path(f"{folder}.told-{rank}").read_text() for rank in range(len(environments)))


def _end(processes: Sequence[BaseProcess], killed: Killed) -> int:
    """Wait until all processes have exited. After a kill, the others must exit within `LOST_SECONDS`."""
    if killed.seconds:
        multiprocessing.connection.wait([process.sentinel for process in processes], killed.seconds)
        for process in [processes[killed.process]] if killed.alone else processes:
            process.kill()
    multiprocessing.connection.wait([process.sentinel for process in processes])
    while all(process.exitcode in (None, 0) for process in processes) and any(process.is_alive() for process in processes):
        time.sleep(0.05)
    deadline = time.monotonic() + LOST_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    codes = [process.exitcode or 0 for process in processes]
    if hanging:
        raise SystemExit(f"{len(hanging)} processes did not end in {LOST_SECONDS:.0f} s after another one: {codes}")
    return min(codes) if min(codes) < 0 else max(codes)


def run_alone(words: Sequence[str], folder: Path, settings: str = "") -> None:
    """Run a stage in a separate program or under a launcher, without kills. Exit if it fails."""
    stage, *options = [*words, "--output_dir", str(folder)]
    if settings:
        launch([f"align/{stage}/train.py", *options], settings, PROCESSES)
        return
    program = [sys.executable, "-m", "align.cli", stage, *options]
    done = subprocess.run(program, cwd=ROOT, env=variables(), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{folder.name}: not killed, but ended with code {done.returncode}:\n{done.stderr[-2000:]}")


def differences(run: Path, whole: Path) -> list[str]:
    """Return the differences between two runs: metrics, files of the model and the last checkpoint, and leftover files."""
    found = [] if metrics(run) == metrics(whole) else ["metrics.jsonl"]
    places = ["model", *(f"checkpoints/{path.name}" for path in sorted((whole / "checkpoints").iterdir()))]
    for place in places:
        ours, theirs = ({path.name for path in (folder / place).glob("*")} for folder in (run, whole))
        if ours != theirs:
            found.append(f"{place}: other files")
        weights = sorted(name for name in ours & theirs if name.endswith(".safetensors"))
        changed = (name for name in weights if (run / place / name).read_bytes() != (whole / place / name).read_bytes())
        found += [f"{place}/{name}" for name in changed]
    ours, theirs = (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.startswith("events.")}
        for folder in (run, whole)
    )
    return found + sorted(f"left behind: {name}" for name in ours - theirs)


def draw_kill(chance: random.Random, seconds: float, operations: Sequence[int]) -> Killed:
    """Draw a kill at a file operation or after a delay, of one process or all processes.

    Args:
        chance: random generator.
        seconds: duration of an uninterrupted run.
        operations: number of file operations of each process in such a run.
    """
    process = chance.randrange(len(operations))
    if chance.random() < 0.5 and operations[process] > 1:
        return Killed(process, operation=chance.randrange(1, operations[process]))
    # Until the processes have connected, only a launcher would end the rest after a kill, and there is no launcher here.
    first = 0.05 if len(operations) == 1 else 0.25
    return Killed(process, seconds=chance.uniform(first, 0.95) * seconds, alone=chance.random() < 0.5)


def _kill_until_it_ends(
    words: Sequence[str], folder: Path, environments: Sequence[dict[str, str]], kills: Sequence[Killed]
) -> tuple[int, str]:
    """Kill a run repeatedly, then let it finish. Return the number of kills and the failure ("" if there was none)."""
    for number, killed in enumerate([*kills, Killed()]):
        code, told = run_forked(words, folder, environments, killed)
        if code == 0:
            return number, ""
        if code != -signal.SIGKILL:
            break
    return number, f"ended with code {code}: {(told.strip().splitlines() or ['it told nothing'])[-1]}"


def kill_and_resume(variant: str, kills: int, chance: random.Random, work: Path) -> dict[str, Any]:
    """Kill a variant's runs `kills` times. Return its row of the tally."""
    settled, settings = LAUNCHED.get(variant, (variant, ""))
    stage, options = VARIANTS[settled]
    made = {name: work / name for name in PREPARED if f"{{{name}}}" in options}
    for name, folder in made.items():
        run_alone([*PREPARED[name].split(), *COMMON.split()], folder)
    words = [stage, *COMMON.split(), *options.format_map({name: folder / "model" for name, folder in made.items()}).split()]
    unbroken, began = work / f"{variant}-whole", time.monotonic()
    run_alone(words, unbroken, settings)
    environments = launched(settings, PROCESSES) if settings else [{}]
    seconds, operations = 0.0, list[int]()
    tally: dict[str, Any] = {"variant": variant, "kills": 0, "runs": 0, "same": 0, "different": []}
    while tally["kills"] < kills and len(tally["different"]) < 20:
        folder, started = work / f"{variant}-{tally['runs']}", time.monotonic()
        # The first run is not killed. It gives the duration and the number of operations of a forked run.
        at_most = min(6, kills - tally["kills"]) if operations else 0
        planned = [draw_kill(chance, seconds, operations) for _ in range(at_most)]
        killed, failure = _kill_until_it_ends(words, folder, environments, planned)
        if not operations:
            if failure:
                raise SystemExit(f"{variant}: a run that nobody kills {failure}")
            seconds = time.monotonic() - started
            operations = [int(Path(f"{folder}.operations-{rank}").read_text()) for rank in range(len(environments))]
        found = [failure] if failure else differences(folder, unbroken)
        tally["kills"] += killed
        tally["runs"] += 1
        tally["same"] += not found
        tally["different"] += [f"run {tally['runs']}: {place}" for place in found]
        shutil.rmtree(folder, ignore_errors=True)
    return tally | {"seconds": round(time.monotonic() - began)}
