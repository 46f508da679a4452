"""The model that labelers talk to in the Probe task: at most one is in memory, in its own process.

The lead loads it by name, or the first message of a batch that names a model does. Unloading ends the process, which frees
all of its memory. A model that exhausts the memory ends its process, not the app, and no reply delays a labeler.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, Literal

from align.core.errors import UserError, first_line
from align.core.launch import quiet_libraries
from align.model_registry.registry import resolve_model

if TYPE_CHECKING:
    from align.commands.chat import Speaker

MAX_NEW_TOKENS = 256
TEMPERATURE = 0.7
NICENESS = 5  # the server answers labelers first


@dataclass(frozen=True)
class Status:
    """Data for the lead's page. `detail` describes the loaded model or the reason why loading failed."""

    state: Literal["none", "loading", "loaded", "failed"] = "none"
    name: str = ""
    detail: str = ""


@dataclass
class _RunningModel:
    name: str
    process: SpawnProcess
    connection: Connection
    detail: str = ""

    def read(self) -> tuple[str, str]:
        """Return the kind and the text of the next message. Raises: UserError for an error, or if the process has ended."""
        try:
            kind, text = self.connection.recv()
        except (EOFError, OSError):
            raise UserError("the model's process has ended (unloaded, or out of memory)") from None
        if kind == "error":
            raise UserError(text)
        return kind, text


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
        if status.state == "loaded" and model is not None and not model.process.is_alive():
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
            model.process.join()

    def reply(self, name: str, messages: list[Any]) -> Iterator[tuple[str, str]]:
        """Yield a model's reply as (its name, the next piece); with an empty name, of the model that the lead has loaded.

        Raises:
            UserError: if there is no model, or it cannot answer.
        """
        with self._lock:
            wanted = name or self._requested  # not a model that another batch has loaded
            if not wanted:
                raise UserError("no model is loaded: ask the lead to load one")
            try:
                model = self._ensure_loaded(wanted)
            except UserError:
                raise UserError("the model cannot be loaded: see the lead's page") from None
            with suppress(OSError):  # of a process that has ended, which `read` reports
                model.connection.send(messages)
            while (message := model.read())[0] == "piece":
                yield wanted, message[1]

    def _ensure_loaded(self, name: str) -> _RunningModel:
        """The model, whose process is started unless it is in memory already."""
        model = self._model
        if model is not None and model.name == name and model.process.is_alive():
            self._status = Status("loaded", name, model.detail)
            return model
        self._stop_process()  # two models may not fit
        self._status = Status("loading", name)
        start = time.monotonic()
        try:
            self._model = model = _start_process(name)
            _, description = model.read()
        except (OSError, ValueError, UserError) as error:
            if self._status.name == name:  # else it was unloaded in the meantime
                self._model, self._status = None, Status("failed", name, str(error))
            raise UserError(str(error)) from None
        model.detail = f"{description}; loaded in {time.monotonic() - start:.0f} s"
        self._status = Status("loaded", name, model.detail)
        return model


def _start_process(name: str) -> _RunningModel:
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=run_model, args=(name, other), daemon=True)
    process.start()
    other.close()  # `connection` ends with the process
    return _RunningModel(name, process, connection)


# ------------------------------------------------------------------------------------------------- in the model's process


def run_model(name: str, connection: Connection) -> None:
    """Load a model, and answer the conversations that come in until the app ends.

    It sends ("ready", description), then for each conversation ("piece", text) any number of times and ("done", ""). In
    place of what fails it sends ("error", reason).
    """
    os.nice(NICENESS)
    with suppress(EOFError, OSError):  # the app has ended
        try:
            resolve_model(name)  # what leads nowhere is refused before the import below, which takes seconds
            from align.commands.chat import Speaker

            quiet_libraries()
            speaker = Speaker(name)
        except Exception as error:
            connection.send(("error", _one_line(error)))
            return
        connection.send(("ready", _described(speaker.loaded.backbone.model)))
        while True:
            messages = connection.recv()
            try:
                for piece in pieces_of_reply(speaker, messages):
                    connection.send(("piece", piece))
                connection.send(("done", ""))
            except Exception as error:
                connection.send(("error", _one_line(error)))


def pieces_of_reply(speaker: "Speaker", messages: list[Any]) -> Iterator[str]:
    """Sample a reply and yield its pieces as they are generated."""
    from align.sampling.generation import SamplingParams

    sent = 0
    for answer in speaker.answer(messages, SamplingParams(MAX_NEW_TOKENS, TEMPERATURE)):
        yield answer.text[sent:]
        sent = max(sent, len(answer.text))


def _described(model: Any) -> str:
    size = sum(weight.numel() for weight in model.parameters())
    count = f"{size / 1e6:,.0f} million" if size >= 1e6 else f"{size:,}"
    return f"{type(model).__name__}, {count} weights, {str(model.dtype).removeprefix('torch.')} on {model.device.type}"


def _one_line(error: BaseException) -> str:
    """The first line of an error's message, with its type unless it is a UserError."""
    return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
