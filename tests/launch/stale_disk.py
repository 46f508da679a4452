"""PPO in two processes on a shared disk that does not show the second one what was just written, as NFS may for a minute.

Usage: stale_disk.py FOLDER: each process writes to RANK.json whether its reference is the one of the checkpoint.
"""

import json
import os
import sys
from pathlib import Path

from align import cli
from align.ppo.setup import REFERENCE_FILE, ReferenceRefresh
from tests.launch.test_launch import checkpoint_words

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
HIDDEN = ("model", REFERENCE_FILE)
exists, load, moved = Path.exists, ReferenceRefresh.load, []


def stale(path: Path, **more: bool) -> bool:
    return exists(path, **more) and not (rank == "1" and path.name in HIDDEN and folder in path.parents)


def load_and_note(refresh: ReferenceRefresh, *arguments: object) -> None:
    load(refresh, *arguments)
    moved.append(refresh.moved)


more = ["--validation_prompts", "data/prompts_validation.jsonl", "--reference_refresh", "1", "--collective_timeout", "60"]
ReferenceRefresh.load = load_and_note
for updates, resume in (("1", "false"), ("2", "true")):
    if resume == "true":  # the first run has written its model on both
        Path.exists = stale
    cli.main(["ppo", *checkpoint_words("tiny-gpt2", folder / "run", int(updates), "--resume", resume, *more)])
(folder / f"{rank}.json").write_text(json.dumps(moved))
