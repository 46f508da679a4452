"""Per-item results in a file, so that an interrupted evaluation resumes where it stopped."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.progress import Progress

from align.core.errors import UserError
from align.core.files import append_line
from align.eval.core.fingerprints import content_hash
from align.eval.core.results import Json
from align.runtime.distributed import run_on_main
from align.runtime.environment import console

CHUNK = 64
"""Items computed between two writes to the file."""


class ResultStore:
    """Per-item results in an append-only JSON Lines file: nothing is computed twice.

    The first line holds the settings that decide an item's result. Each further line is `{"item": id, ...}`, with
    a hash in `"content"` if the caller gives the item's content; of two lines with the same id the later one counts. A
    last line that was cut short when the program was killed is dropped.

    Args:
        path: `OUTPUT/<task>-<name>.jsonl`.
        settings: everything that affects an item's result: `EvalConfig.result_settings()`, fingerprints of model and scorer.
        accelerator: every process holds the results; the main process writes them.

    Raises:
        UserError: if the file holds results of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], accelerator: Accelerator) -> None:
        self.path, self.accelerator = path, accelerator
        self.settings = json.loads(json.dumps(dict(settings)))
        # What is missing must be the same on every process, so one of them looks at the disk.
        self.results: dict[str, Json] = run_on_main(self._open, accelerator)

    def _open(self) -> dict[str, Json]:
        """The results in the file, which is begun where there is none."""
        results = self._read()
        if results is None:
            self._append({"settings": self.settings})
        return results or {}

    def _read(self) -> dict[str, Json] | None:
        """The file's results; None if it holds no line."""
        if not self.path.exists():
            return None
        lines = self.path.read_bytes().splitlines(keepends=True)
        rows = []
        for number, line in enumerate(lines):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                if number + 1 < len(lines):
                    raise UserError(
                        f"{self.path}:{number + 1}: not JSON ({error}); delete the file to start from scratch"
                    ) from error
                os.truncate(self.path, sum(map(len, lines[:-1])))  # the program was killed in the middle of the last line
        if not rows:
            return None
        stored = rows[0].get("settings", {})
        changed = [key for key in {**stored, **self.settings} if stored.get(key) != self.settings.get(key)]
        if changed:
            difference = f"{changed[0]} {stored.get(changed[0])!r}, not {self.settings.get(changed[0])!r}"
            raise UserError(f"{self.path} holds results with {difference}; choose another output folder, or delete the file")
        return {row.pop("item"): row for row in rows[1:]}

    def fill(
        self,
        items: Mapping[str, Any],
        compute: Callable[[list[Any]], Sequence[Json]],
        chunk: int = CHUNK,
        label: str = "",
        content: Callable[[Any], object] | None = None,
    ) -> list[Json]:
        """Compute the missing results, `chunk` items at a time, and return all of them in the order of the items.

        Args:
            items: what to compute, by id.
            compute: from a chunk of items, the same on every process, to one row of JSON values for each.
            chunk: items computed between two writes.
            label: shown next to the progress bar.
            content: what an item's result depends on, as JSON values; a result stored under the same id for different
                content is recomputed. None: the id identifies the content.

        Raises:
            UserError: if the file cannot be written, or a result is not finite.
        """
        hashes = {name: content_hash(content(item)) for name, item in items.items()} if content else {}
        missing = [
            name
            for name in items
            if name not in self.results or (content and self.results[name].get("content") != hashes[name])
        ]
        with Progress(console=console, transient=True, disable=not self.accelerator.is_main_process) as progress:
            task = progress.add_task(label or self.path.stem, total=len(items), completed=len(items) - len(missing))
            for start in range(0, len(missing), chunk):
                names = missing[start : start + chunk]
                for name, row in zip(names, compute([items[name] for name in names]), strict=True):
                    self.add(name, {"content": hashes[name], **row} if content else row)
                progress.advance(task, len(names))
        return [self.results[name] for name in items]

    def add(self, name: str, row: Json) -> None:
        """Store one result. Call it on all processes with the same row."""
        if self.accelerator.is_main_process:
            self._append({"item": name, **row})
        self.results[name] = json.loads(json.dumps(row))

    def _append(self, row: Json) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        except ValueError as error:
            raise UserError(
                f"{self.path.stem}: a result is not a finite number; results completed so far are saved"
            ) from error
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error})") from error
