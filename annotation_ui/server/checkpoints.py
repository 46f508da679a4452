"""Models of the Probe task. The two most recently used stay in memory, each in its own process.

The lead loads one by name, or the first message of a batch that names a model does. Unloading ends the processes, which
frees all of their memory. A model that exhausts the memory ends its process, not the app, and no reply delays a labeler.
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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from align.core.errors import UserError, first_line
from align.core.launch import quiet_libraries
from align.model_registry.registry import resolve_model

if TYPE_CHECKING:
    from align.commands.chat import Speaker

MODELS = 2
"""Maximum number of models in memory. Batches that compare two models alternate between them."""
TEMPERATURE = 0.7
NICENESS = 5  # the server answers labelers first


@dataclass(frozen=True)
class Status:
    """Data for the lead's page. `detail` describes the loaded model or the reason why loading failed."""

    state: Literal["none", "loading", "loaded", "failed"] = "none"
    name: str = ""
    detail: str = ""


class Piece(NamedTuple):
    """A piece of a model's reply. If `cut`, the reply ends here, at the token limit."""

    model: str
    text: str
    cut: bool = False


class _OutOfMemoryError(UserError):
    """Raised if the process has ended or is out of memory."""


@dataclass
class _RunningModel:
    name: str
    process: SpawnProcess
    connection: Connection
    detail: str = ""

    def read(self) -> tuple[str, str]:
        """Return the kind and text of the next message. Raise UserError for an error, or if the process has ended."""
        try:
            kind, text = self.connection.recv()
        except (EOFError, OSError):
            raise _OutOfMemoryError("the model's process has ended (unloaded, or out of memory)") from None
        if kind == "error":
            raise _OutOfMemoryError(text) if "memory" in text else UserError(text)
        return kind, text

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


class Checkpoints:
    """Loads models and generates replies. One operation runs at a time.

    The last model that the lead asked for, and the model of the last message, is that of `status`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status = Status()
        self._models: dict[str, _RunningModel] = {}  # by name, the one used last at the end
        self._requested = ""  # what the lead asked for last and has not unloaded since

    @property
    def status(self) -> Status:
        status = self._status
        model = self._models.get(status.name)
        if status.state == "loaded" and model is not None and not model.process.is_alive():
            return Status("failed", status.name, "its process has ended; the next message loads it again")
        return status

    def load(self, name: str) -> None:
        """Start loading a model. `status` shows the progress."""
        name = name.strip()
        if not name:
            raise UserError("no model given; use a folder, a hub name or a built-in model")
        self._requested = name
        self._status = Status("loading", name, "waiting until the current reply is complete" if self._lock.locked() else "")

        def load_when_free() -> None:
            with self._lock, suppress(UserError):  # `status` shows the error
                if self._requested == name:  # else it was unloaded, or another model requested, in the meantime
                    self._ensure_loaded(name)

        threading.Thread(target=load_when_free, daemon=True).start()

    def unload(self) -> None:
        """Stop the processes of all models, even during a reply, and cancel a pending load."""
        self._requested = ""
        models, self._models, self._status = self._models, {}, Status()
        for model in models.values():
            model.stop()

    def reply(self, name: str, messages: list[Any], max_new_tokens: int) -> Iterator[Piece]:
        """Yield a model's reply in pieces. An empty name selects the model loaded by the lead.

        Raises:
            UserError: if there is no model, or it cannot answer.
        """
        with self._lock:
            wanted = name or self._requested  # not a model that another batch has loaded
            if not wanted:
                raise UserError("no model loaded; ask the lead to load one")
            try:
                model = self._ensure_loaded(wanted)
            except UserError:
                raise UserError("the model failed to load; see the lead's page") from None
            with suppress(OSError):  # of a process that has ended, which `read` reports
                turns = [{"role": message["role"], "content": message["content"]} for message in messages]
                model.connection.send((turns, max_new_tokens))
            while (message := model.read())[0] == "piece":
                yield Piece(wanted, message[1])
            yield Piece(wanted, "", cut=message[1] == "cut")

    def _ensure_loaded(self, name: str) -> _RunningModel:
        """Return the model, and start its process unless it is in memory."""
        model = self._models.pop(name, None)
        if model is None or not model.process.is_alive():
            self._keep(MODELS - 1)
            try:
                model = self._start(name)
            except _OutOfMemoryError:
                if self._status.name != name or not self._keep(0):  # it was unloaded in the meantime, or was alone
                    raise
                model = self._start(name)
        self._models[name] = model
        others = ", ".join(other for other in self._models if other != name)
        self._status = Status("loaded", name, f"{model.detail}{f'; also in memory: {others}' if others else ''}")
        return model

    def _keep(self, count: int) -> bool:
        """Stop all but the `count` most recently used models. Return whether any was stopped."""
        stopped = list(self._models)[: max(0, len(self._models) - count)]
        for name in stopped:
            model = self._models.pop(name, None)
            if model is not None:  # else it was unloaded at this moment
                model.stop()
        return bool(stopped)

    def _start(self, name: str) -> _RunningModel:
        """Start a model's process and wait until it is loaded."""
        self._status = Status("loading", name)
        start = time.monotonic()
        try:
            self._models[name] = model = _start_process(name)
            _, description = model.read()
        except (OSError, ValueError, UserError) as error:
            failed = self._models.pop(name, None)
            if failed is not None:
                failed.stop()
            if self._status.name == name:  # else it was unloaded in the meantime
                self._status = Status("failed", name, str(error))
            raise (error if isinstance(error, UserError) else UserError(str(error))) from None
        model.detail = f"{description}; loaded in {time.monotonic() - start:.0f} s"
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
    """Load a model, and reply to conversations until the app ends.

    It sends ("ready", description), then for each conversation and limit of tokens ("piece", text) any number of times and
    ("done", "cut" or ""). On a failure, it sends ("error", reason) instead.
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
            messages, max_new_tokens = connection.recv()
            try:
                for message in pieces_of_reply(speaker, messages, max_new_tokens):
                    connection.send(message)
            except Exception as error:
                connection.send(("error", _one_line(error)))


def pieces_of_reply(speaker: "Speaker", messages: list[Any], max_new_tokens: int) -> Iterator[tuple[str, str]]:
    """Yield ("piece", text) as a reply is generated, and at last ("done", "cut"), or ("done", "") if it ended by itself."""
    from align.sampling.generation import SamplingParams

    sent, ended = 0, False
    for answer in speaker.answer(messages, SamplingParams(max_new_tokens, TEMPERATURE)):
        yield "piece", answer.text[sent:]
        sent, ended = max(sent, len(answer.text)), answer.ended
    yield "done", "" if ended else "cut"


def _described(model: Any) -> str:
    size = sum(weight.numel() for weight in model.parameters())
    count = f"{size / 1e6:,.0f} million" if size >= 1e6 else f"{size:,}"
    return f"{type(model).__name__}, {count} weights, {str(model.dtype).removeprefix('torch.')} on {model.device.type}"


def _one_line(error: BaseException) -> str:
    """Return the first line of an error's message, with its type unless it is a UserError."""
    return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
