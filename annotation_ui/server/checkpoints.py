"""Models of the Probe task. The two most recently used models stay in memory, each in its own process.

A model is loaded by the lead, or by the first message of a batch that names it. Unloading kills the processes, so all of
their memory is freed. A model that runs out of memory takes down only its own process. The processes run at low priority
so that replies do not slow down the server.
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
NICENESS = 5  # lower priority than the server


@dataclass(frozen=True)
class Status:
    """State of a model for the lead's page. `detail` describes the loaded model, or gives the reason for a failure."""

    state: Literal["none", "loading", "loaded", "failed"] = "none"
    name: str = ""
    detail: str = ""


class Piece(NamedTuple):
    """Part of a model's reply. `cut` marks the end of a reply that reached the token limit."""

    model: str
    text: str
    cut: bool = False


class _OutOfMemoryError(UserError):
    """Raised if the model's process has exited or is out of memory."""


@dataclass
class _RunningModel:
    name: str
    process: SpawnProcess
    connection: Connection
    detail: str = ""

    def read(self) -> tuple[str, str]:
        """Return (kind, text) of the next message. Raise UserError if it reports an error or the process has exited."""
        try:
            kind, text = self.connection.recv()
        except (EOFError, OSError):
            raise _OutOfMemoryError("the model's process has ended (unloaded, or out of memory)") from None
        if kind == "error":
            raise _OutOfMemoryError(text) if "memory" in text else UserError(text)
        return kind, text

    def stop(self) -> None:
        """Kill the process and wait until it has exited."""
        self.process.kill()
        self.process.join()


class Checkpoints:
    """Loads models and generates replies, one operation at a time.

    `status` describes the model that the lead last requested or that last received a message, whichever is more recent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status = Status()
        self._models: dict[str, _RunningModel] = {}  # by name, least recently used first
        self._requested = ""  # the lead's last request; empty after unloading

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
                if self._requested == name:  # else the lead has unloaded it or requested another model
                    self._ensure_loaded(name)

        threading.Thread(target=load_when_free, daemon=True).start()

    def unload(self) -> None:
        """Kill the processes of all models, even during a reply, and cancel a pending load."""
        self._requested = ""
        models, self._models, self._status = self._models, {}, Status()
        for model in models.values():
            model.stop()

    def reply(self, name: str, messages: list[Any], max_new_tokens: int) -> Iterator[Piece]:
        """Yield a model's reply in pieces. An empty name selects the model loaded by the lead.

        Raises:
            UserError: If no model is loaded, loading fails, or the model cannot reply.
        """
        with self._lock:
            wanted = name or self._requested  # never a model loaded by another batch
            if not wanted:
                raise UserError("no model loaded; ask the lead to load one")
            try:
                model = self._ensure_loaded(wanted)
            except UserError:
                raise UserError("the model failed to load; see the lead's page") from None
            with suppress(OSError):  # if the process has exited, `read` reports it
                turns = [{"role": message["role"], "content": message["content"]} for message in messages]
                model.connection.send((turns, max_new_tokens))
            while (message := model.read())[0] == "piece":
                yield Piece(wanted, message[1])
            yield Piece(wanted, "", cut=message[1] == "cut")

    def _ensure_loaded(self, name: str) -> _RunningModel:
        """Return the running model. Start its process if it is not in memory."""
        model = self._models.pop(name, None)
        if model is None or not model.process.is_alive():
            self._keep(MODELS - 1)
            try:
                model = self._start(name)
            except _OutOfMemoryError:
                if self._status.name != name or not self._keep(0):  # unloaded meanwhile, or no other model to stop
                    raise
                model = self._start(name)
        self._models[name] = model
        others = ", ".join(other for other in self._models if other != name)
        self._status = Status("loaded", name, f"{model.detail}{f'; also in memory: {others}' if others else ''}")
        return model

    def _keep(self, count: int) -> bool:
        """Stop all but the `count` most recently used models. Return whether any model was stopped."""
        stopped = list(self._models)[: max(0, len(self._models) - count)]
        for name in stopped:
            model = self._models.pop(name, None)
            if model is not None:  # else `unload` has just stopped it
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
            if self._status.name == name:  # else it has been unloaded
                self._status = Status("failed", name, str(error))
            raise (error if isinstance(error, UserError) else UserError(str(error))) from None
        model.detail = f"{description}; loaded in {time.monotonic() - start:.0f} s"
        return model


def _start_process(name: str) -> _RunningModel:
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=run_model, args=(name, other), daemon=True)
    process.start()
    other.close()  # so that `connection` reports end of file when the process exits
    return _RunningModel(name, process, connection)


# ------------------------------------------------------------------------------------------------- in the model's process


def run_model(name: str, connection: Connection) -> None:
    """Load a model and reply to conversations until the app exits.

    Sends ("ready", description) after loading. Receives (messages, max_new_tokens) for each reply, and sends ("piece", text)
    repeatedly, then ("done", "cut" or ""). Sends ("error", reason) if loading or a reply fails.
    """
    os.nice(NICENESS)
    with suppress(EOFError, OSError):  # raised when the app has exited
        try:
            resolve_model(name)  # reject an unknown name before the slow import below
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
    """Yield ("piece", text) while a reply is generated, then ("done", "cut") at the token limit, else ("done", "")."""
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
    """Return the first line of an error's message, prefixed with the error's type unless it is a UserError."""
    return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
