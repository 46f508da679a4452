"""The model that labelers talk to in the Probe task: at most one is in memory, in its own process (`model_process`).

The lead loads it by name, or the first message of a batch that names a model does. Unloading ends the process, which
frees all of its memory.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from align.core.errors import UserError

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Status:
    """Data for the lead's page. `detail` describes the loaded model or the reason why loading failed."""

    state: Literal["none", "loading", "loaded", "failed"] = "none"
    name: str = ""
    detail: str = ""


@dataclass
class _RunningModel:
    name: str
    process: subprocess.Popen[str]
    detail: str = ""


class Checkpoints:
    """Loads models and lets them answer. One operation runs at a time; others wait for the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status = Status()
        self._model: _RunningModel | None = None
        self._requested = ""  # what the lead asked for last and has not unloaded since

    @property
    def status(self) -> Status:
        model, status = self._model, self._status
        if status.state == "loaded" and model is not None and model.process.poll() is not None:
            return Status("failed", status.name, "its process has ended; the next message loads it again")
        return status

    def load(self, name: str) -> None:
        """Start to load a model and return at once; `status` shows the progress."""
        name = name.strip()
        if not name:
            raise UserError("name a model: a folder, a hub name or a built-in one")
        self._requested = name
        self._status = Status("loading", name, "waiting until the current reply is complete" if self._lock.locked() else "")

        def load_when_free() -> None:
            with self._lock, suppress(UserError):  # `status` shows the error
                if self._requested == name:  # else it was unloaded, or another model requested, in the meantime
                    self._ensure_loaded(name)

        threading.Thread(target=load_when_free, daemon=True).start()

    def unload(self) -> None:
        """End the model's process, even in the middle of a reply, and cancel a load that is still waiting."""
        self._requested = ""
        self._stop_process()

    def _stop_process(self) -> None:
        model, self._model, self._status = self._model, None, Status()
        if model is not None:
            model.process.kill()
            model.process.wait()

    def reply(self, name: str, messages: Messages) -> Iterator[tuple[str, str]]:
        """Yield a model's reply as (its name, the next piece); with an empty name, of the model that the lead has loaded.

        Raises:
            UserError: if there is no model, or it cannot answer.
        """
        with self._lock:
            wanted = name or self._requested  # not a model that another batch has loaded
            if not wanted:
                raise UserError("no model is loaded: ask the lead to load one")
            try:
                process = self._ensure_loaded(wanted)
            except UserError:
                raise UserError("the model cannot be loaded: see the lead's page") from None
            _write_message(process, {"messages": messages})
            while "done" not in (message := _read_message(process)):
                if "error" in message:
                    raise UserError(message["error"])
                yield wanted, message["piece"]

    def _ensure_loaded(self, name: str) -> subprocess.Popen[str]:
        """The process of a model, which is started unless the model is in memory already."""
        model = self._model
        if model is not None and model.name == name and model.process.poll() is None:
            self._status = Status("loaded", name, model.detail)
            return model.process
        self._stop_process()  # two models may not fit
        self._status = Status("loading", name)
        start = time.monotonic()
        try:
            self._model = model = _RunningModel(name, _start_process(name))
            message = _read_message(model.process)
            if "error" in message:
                raise UserError(message["error"])
        except (OSError, ValueError, UserError) as error:
            if self._status.name == name:  # else it was unloaded in the meantime
                self._model, self._status = None, Status("failed", name, str(error))
            raise UserError(str(error)) from None
        model.detail = f"{message['ready']}; loaded in {time.monotonic() - start:.0f} s"
        self._status = Status("loaded", name, model.detail)
        return model.process


def _start_process(name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "annotation_ui.server.model_process", name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")


def _write_message(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except (OSError, ValueError):
        raise UserError("the model's process has ended") from None


def _read_message(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
    except ValueError:  # closed: it was unloaded
        line = ""
    if not line.endswith("\n"):
        raise UserError("the model's process has ended (unloaded, or out of memory)")
    message: dict[str, Any] = json.loads(line)
    return message
