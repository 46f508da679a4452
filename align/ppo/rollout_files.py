"""Rollouts on disk: a Parquet file for each recorded update, with a row for each response.

A file is complete before the optimizer steps of its update. Its bytes and the choice of updates depend only on the run, so a
resumed run writes the same files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from align.core.errors import UserError
from align.core.files import new_file, numbered_paths
from align.ppo.losses import kl_estimate
from align.ppo.records import Experience
from align.tokenization import Tokenization
from align.training.run import Run

FOLDER = "rollouts"
REWARD_PREFIX = "reward/"
"""Prefix of the columns of reward parts, as in their metrics."""
UPDATES = 100
"""Number of updates whose rollouts are written, evenly spread over the run."""
ROWS = 64
"""Number of responses written per rollout. The first ones, because prompts are in random order."""
PER_TOKEN = ("log_probs", "kl", "values", "advantages")
FLOATS, TURNS = pa.list_(pa.float32()), pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


_COLUMNS: dict[str, pa.DataType] = {
    "update": pa.int32(),
    "row": pa.int32(),
    "id": pa.string(),
    "category": pa.string(),
    "prompt": TURNS,
    "text": pa.string(),
    "ended": pa.bool_(),
    "reward": pa.float32(),
    "score": pa.float32(),
    "ids": pa.list_(pa.int32()),
    "tokens": pa.list_(pa.string()),
    **dict.fromkeys(PER_TOKEN, FLOATS),
}
"""All columns except the parts of the reward."""


def recorded_updates(updates: int, count: int) -> frozenset[int]:
    """Choose `count` of the updates 1 to `updates`, evenly spaced from the first to the last. A single one is the last."""
    count = min(count, updates)
    if count < 2:
        return frozenset({updates} if count else ())
    return frozenset(1 + round(number * (updates - 1) / (count - 1)) for number in range(count))


def rows_of(update: int, experience: Experience, tokenization: Tokenization, count: int) -> list[dict[str, Any]]:
    """Return the first rows of a rollout with the numbers of its update; docs/metrics.md describes each column."""
    rollout, outputs = experience.rollout, experience.old
    kl = kl_estimate(outputs.log_probs, outputs.ref_log_probs, "k1")
    per_token = dict(zip(PER_TOKEN, (outputs.log_probs, kl, outputs.values, experience.advantages), strict=True))
    return [
        {
            "update": update,
            "row": row,
            "id": prompt.id,
            "category": prompt.category,
            "prompt": [{"role": turn["role"], "content": turn["content"]} for turn in prompt.conversation],
            "text": rollout.texts[row],
            "ended": rollout.ended[row],
            "reward": float(experience.scores[row]),
            "score": float(experience.signal.scores[row]),
            "ids": ids,
            "tokens": tokenization.token_texts(ids),
            **{name: values[row, : len(ids)].tolist() for name, values in per_token.items()},
            **{f"{REWARD_PREFIX}{name}": float(values[row]) for name, values in experience.signal.components.items()},
        }
        for row, (prompt, ids) in enumerate(zip(rollout.prompts[:count], rollout.responses, strict=False))
    ]


class RolloutRecorder:
    """Writes the rollouts of up to `UPDATES` updates of a run.

    Args:
        total_updates: number of updates in the run, from which the recorded ones are chosen.
    """

    def __init__(self, run: Run, tokenization: Tokenization, total_updates: int) -> None:
        self.run, self.tokenization = run, tokenization
        self.recorded = recorded_updates(total_updates, UPDATES)

    def remove_after(self, update: int) -> None:
        """Remove files that a killed run wrote after the checkpoint that it resumes from."""
        if self.run.is_main:
            for number, path in rollout_paths(self.run.folder).items():
                if number > update:
                    path.unlink()

    def write(self, update: int, experience: Experience) -> None:
        """Write the rollout of an update, if it is a recorded one. Raise a UserError if the file cannot be written."""
        if update in self.recorded and self.run.is_main:
            write_rollout(rollout_path(self.run.folder, update), rows_of(update, experience, self.tokenization, ROWS))


def rollout_path(run: Path, update: int) -> Path:
    """Return the path of an update's rollout file in a run's folder."""
    return run / FOLDER / f"update-{update:06d}.parquet"


def rollout_paths(run: Path) -> dict[int, Path]:
    """Return the rollout files in a run's folder, by update."""
    return numbered_paths(run / FOLDER, "update-", ".parquet")


def write_rollout(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as one Parquet file, through a temporary path.

    Raises:
        UserError: if the disk is full or not writable.
    """
    parts = dict.fromkeys(name for row in rows for name in row if name.startswith(REWARD_PREFIX))
    columns = _COLUMNS | dict.fromkeys(parts, pa.float32())
    table = pa.Table.from_pylist(list(rows), pa.schema(columns))
    # Log-probs hardly ever repeat, so a dictionary would waste space.
    repeated = [name for name in columns if name not in PER_TOKEN]
    repeated = [f"{name}.list.element" if name in ("ids", "tokens") else name for name in repeated]
    form: dict[str, Any] = {"compression": "zstd", "use_dictionary": repeated, "write_statistics": False}
    try:
        with new_file(path) as file, pq.ParquetWriter(file, table.schema, store_schema=False, **form) as writer:
            writer.write_table(table)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
