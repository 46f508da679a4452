"""The model that probing labelers talk to: at most one is in memory, in a process of its own (`model_process`).

The lead loads it by name, or the first message of a batch that names one does. Unloading ends the process, which gives
all of its memory back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from align.errors import UserError

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Status:
    """What the lead sees: `detail` says what was loaded, or why it was not."""

    state: Literal["none", "loading", "loaded", "failed"] = "none"
    name: str = ""
    detail: str = ""


@dataclass
class _Model:
    name: str
    process: subprocess.Popen[str]
    detail: str = ""


class Checkpoints:
    """Loads models and lets them answer; one thing at a time, the others wait for their turn."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._status = Status()
        self._model: _Model | None = None
        self._asked = ""  # what the lead asked for and has not unloaded since

    @property
    def status(self) -> Status:
        model, status = self._model, self._status
        if status.state == "loaded" and model is not None and model.process.poll() is not None:
            return Status("failed", status.name, "its process has ended; the next message loads it again")
        return status

    def load(self, name: str) -> None:
        """Begin to load a model and return at once; `status` tells how it goes.

        Raises:
            UserError: if no name is given.
        """
        name = name.strip()
        if not name:
            raise UserError("name a model: a folder, a hub name or a built-in one")
        self._asked = name
        self._status = Status("loading", name, "waits for a reply that is being made" if self._turn.locked() else "")

        def work() -> None:
            with self._turn, suppress(UserError):  # an error stands in `status`
                if self._asked == name:  # else it was unloaded, or another one asked for, while this waited
                    self._ready(name)

        threading.Thread(target=work, daemon=True).start()

    def unload(self) -> None:
        """End the model's process, also in the middle of a reply, and load none that waits."""
        self._asked = ""
        self._end()

    def _end(self) -> None:
        model, self._model, self._status = self._model, None, Status()
        if model is not None:
            model.process.kill()
            model.process.wait()

    def reply(self, name: str, messages: Messages) -> Iterator[tuple[str, str]]:
        """(model, piece of its reply) as they come. `name` empty: whatever the lead has loaded.

        Raises:
            UserError: if there is no model, or it cannot answer.
        """
        with self._turn:
            wanted = name or self._status.name
            if not wanted:
                raise UserError("no model is loaded: the lead does that")
            try:
                process = self._ready(wanted)
            except UserError:
                raise UserError("the model cannot be loaded: the lead's page says why") from None
            _write(process, {"messages": messages})
            while "done" not in (said := _read(process)):
                if "error" in said:
                    raise UserError(said["error"])
                yield wanted, said["piece"]

    def _ready(self, name: str) -> subprocess.Popen[str]:
        """The process of a model, started unless it is the one in memory."""
        model = self._model
        if model is not None and model.name == name and model.process.poll() is None:
            self._status = Status("loaded", name, model.detail)
            return model.process
        self._end()  # two may not fit
        self._status = Status("loading", name)
        start = time.monotonic()
        try:
            self._model = model = _Model(name, _start(name))
            said = _read(model.process)
            if "error" in said:
                raise UserError(said["error"])
        except (OSError, ValueError, UserError) as error:
            if self._status.name == name:  # else it was unloaded meanwhile
                self._model, self._status = None, Status("failed", name, str(error))
            raise UserError(str(error)) from None
        model.detail = f"{said['ready']}; loaded in {time.monotonic() - start:.0f} s"
        self._status = Status("loaded", name, model.detail)
        return model.process


def _start(name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "annotation_ui.model_process", name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")


def _write(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except (OSError, ValueError):
        raise UserError("the model's process has ended") from None


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
    except ValueError:  # closed: it was unloaded
        line = ""
    if not line.endswith("\n"):
        raise UserError("the model's process has ended (unloaded, or out of memory)")
    return json.loads(line)
