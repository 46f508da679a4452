"""PPO in two processes on a shared disk that does not show the second one what was just written, as NFS may for a minute.

Usage: stale_disk.py FOLDER: each process writes to RANK.json whether its reference is the one of the checkpoint, and the
code and line with which a resumed run ends that cannot see the checkpoint's reference.
"""

import io
import json
import os
import sys
from contextlib import redirect_stderr
from pathlib import Path

from align import cli
from align.training.checkpoint import Checkpoint
from tests.launch.launcher import ppo_words

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
hidden: set[str] = set()
exists, load, moved, ended, told = Path.exists, Checkpoint.load, [], [], io.StringIO()


def stale(path: Path, **more: bool) -> bool:
    return exists(path, **more) and not (rank == "1" and path.name in hidden and folder in path.parents)


def load_and_note(checkpoint: Checkpoint) -> int:
    done = load(checkpoint)
    moved.append(checkpoint.stateful["reference_refresh"].moved)
    return done


more = ["--validation_prompts", "data/prompts_validation.jsonl", "--reference_refresh", "1", "--collective_timeout", "60"]
Checkpoint.load = load_and_note
Path.exists = stale
for updates, resume, names in (
    ("1", "false", set()),
    ("2", "true", {"reference_refresh.safetensors"}),
    ("2", "true", {"model"}),
):
    hidden = names
    words = ppo_words("tiny-gpt2", folder / "run", int(updates), "--resume_from_checkpoint", resume, *more)
    try:
        with redirect_stderr(told):
            cli.main(["ppo", *words])
        ended.append(0)
    except SystemExit as error:
        ended += [error.code, told.getvalue().splitlines()[-1]]
(folder / f"{rank}.json").write_text(json.dumps([moved, ended]))
