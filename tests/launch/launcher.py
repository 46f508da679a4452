"""Start scripts under `accelerate launch` as a user would, several in the same processes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
IN_TURN = Path(__file__).with_name("in_turn.py")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def launch(words: Sequence[str], settings: str, processes: int = 2, seconds: float = 600, **environment: str) -> str:
    """Run a script in some processes on the CPU as its user would; returns what it printed.

    Args:
        words: the script and its arguments.
        settings: one of the files in configs/accelerate, without its ending.
        seconds: that it may take.
        environment: further variables.
    """
    launcher = ["-m", "accelerate.commands.launch", "--config_file", f"configs/accelerate/{settings}.yaml"]
    launcher += ["--num_processes", str(processes), "--main_process_port", str(free_port())]
    # Hiding GPUs, for accelerate's own `--cpu` starts one process whatever `--num_processes` says.
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | environment
    program = [sys.executable, *launcher, *words]
    done = subprocess.run(program, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-12000:]
    return done.stdout


def launch_in_turn(
    scripts: Sequence[Sequence[str]],
    folder: Path,
    settings: str,
    processes: int = 2,
    seconds: float = 600,
    **environment: str,
) -> str:
    """Run several scripts one after another in the same processes, whose imports are then paid for once."""
    (folder / "scripts.json").write_text(json.dumps(scripts))
    return launch([str(IN_TURN), str(folder / "scripts.json")], settings, processes, seconds, **environment)
