"""Start scripts under `accelerate launch` as a user would, several in the same processes; or fork what it would start."""

import functools
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from align.core.files import read_json, write_json
from tests.files import ROOT
from tests.ports import free_port

IN_TURN = Path(__file__).parent / "programs" / "in_turn.py"
PPO = "align/ppo/train.py"
SECONDS = 600.0
"""That a launch may take."""
CHECKPOINTS = """
    --reward_functions align.ppo.toy_rewards:share_of_e --dtype float32 --report_to none --save_steps 1
    --max_prompt_tokens 64 --overlong truncate --max_new_tokens 8 --rollout_batch_size 6
    --lr_scheduler_type constant --learning_rate 1e-3 --missing_eos_score none
"""
TELL = """
import json, os, sys
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(json.dumps(dict(os.environ)))
"""


def ppo_words(model: str, folder: Path, updates: int, *more: str) -> list[str]:
    """The words after `align ppo` for a run with a checkpoint after every update."""
    return ["--model", model, "--output_dir", str(folder), "--total_updates", str(updates), *CHECKPOINTS.split(), *more]


def launch(words: Sequence[str], settings: str, processes: int = 2) -> str:
    """Run a script in some processes on the CPU as its user would; returns what it printed.

    Args:
        words: the script and its arguments.
        settings: one of the files in configs/accelerate, without its ending.
    """
    launcher = ["-m", "accelerate.commands.launch", "--config_file", f"configs/accelerate/{settings}.yaml"]
    launcher += ["--num_processes", str(processes), "--main_process_port", str(free_port())]
    program = [sys.executable, *launcher, *words]
    done = subprocess.run(program, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-12000:]
    return done.stdout


def variables() -> dict[str, str]:
    """The environment of a launch on the CPU."""
    # Hiding GPUs, for accelerate's own `--cpu` starts one process whatever `--num_processes` says.
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


@functools.cache
def launched(settings: str, processes: int) -> list[dict[str, str]]:
    """The variables that `accelerate launch` gives each process of its own; all but the port are the same in every launch.

    They are kept beside the built-in models, for other workers and later runs.

    Args:
        settings: a file in configs/accelerate, without its ending.
    """
    written = (ROOT / "configs" / "accelerate" / f"{settings}.yaml").read_bytes()
    made_by = f"{version('accelerate')} {version('torch')} {ROOT} {processes}".encode()
    kept = Path(os.environ["ALIGN_CACHE"]) / f"launch-{hashlib.sha256(made_by + written).hexdigest()[:16]}.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "tell.py"
            script.write_text(TELL)
            launch([str(script), folder], settings, processes)
            found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(processes)]
        own = [{name: value for name, value in each.items() if os.environ.get(name) != value} for each in found]
        write_json(kept, own)
    told = read_json(kept)
    # The launcher's agent keeps the store by which processes find each other; here the first one does.
    return [each | {"TORCHELASTIC_USE_AGENT_STORE": "False"} for each in told]


def environments(settings: str, processes: int) -> list[dict[str, str]]:
    """The whole environment of each process of a new launch."""
    port = {"MASTER_PORT": str(free_port())}
    return [variables() | each | port for each in launched(settings, processes)]


def start_processes(words: Sequence[str], settings: str) -> list["subprocess.Popen[str]"]:
    """Start a script in two processes that know each other, without a launcher above them that would end them.

    Args:
        words: the script and its arguments.
        settings: a file in configs/accelerate, without its ending.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = [sys.executable, *words]
    return [subprocess.Popen(program, cwd=ROOT, env=each, text=True, **pipes) for each in environments(settings, 2)]


def launch_in_turn(
    scripts: Sequence[Sequence[str]], folder: Path, settings: str, processes: int = 2, real: bool = False
) -> str:
    """Run several scripts one after another in the same processes; returns what they printed.

    Args:
        real: whether a launcher starts these processes. Otherwise `in_turn.py` forks them with the variables that it gives
            them: most of a launch's time are imports.
    """
    if real:
        (folder / "scripts.json").write_text(json.dumps(scripts))
        return launch([str(IN_TURN), str(folder / "scripts.json"), "compile"], settings, processes)
    printed, told = (folder / name for name in ("printed", "told"))
    request = {"environments": environments(settings, processes), "printed": str(printed), "told": str(told)}
    server = _fork_server()
    assert server.stdin
    assert server.stdout
    print(json.dumps(request | {"scripts": [[*map(str, words)] for words in scripts]}), file=server.stdin, flush=True)
    if not select.select([server.stdout], [], [], SECONDS)[0]:
        os.killpg(server.pid, signal.SIGKILL)
        _fork_server.cache_clear()
        raise AssertionError(f"no end within {SECONDS:.0f} s")
    codes = json.loads(server.stdout.readline())
    output, errors = ("".join(Path(f"{name}-{rank}").read_text() for rank in range(processes)) for name in (printed, told))
    assert codes == [0] * processes, f"{codes}\n{errors[-12000:]}"
    return output


@functools.cache
def _fork_server() -> subprocess.Popen[str]:
    """The program that forks; it ends with this one, whose pipe it reads."""
    program = [sys.executable, "-m", "tests.launch.programs.in_turn"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(program, cwd=ROOT, env=variables(), text=True, start_new_session=True, **pipes)
