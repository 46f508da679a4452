"""Talking to a checkpoint: a thread waits for each reply and streams it without holding one of the server's.

The conversation is kept in the assignment's `transcript`, which only this module writes: a labeler's message when it
arrives, the reply when it is complete. A browser that goes away, or a server that dies, loses no complete message.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from align.errors import UserError
from annotation_ui.judgments import ConflictError, Judgments
from annotation_ui.tasks.base import BadInputError

Messages = list[dict[str, str]]
Reply = Callable[[str, Messages], Iterator[tuple[str, str]]]  # (checkpoint, conversation) -> (model, piece of its reply)

MAX_MESSAGE = 20_000
MAX_TURNS = 50


class Probing:
    """Conversations of labelers with `reply` (see `checkpoints`)."""

    def __init__(self, judgments: Judgments, reply: Reply) -> None:
        self._judgments = judgments
        self._reply = reply
        self._busy: set[int] = set()  # assignments whose reply is being made: the thread dies with the process
        self._lock = threading.Lock()

    def say(self, user_id: int, assignment_id: int, text: str) -> tuple[str, Messages]:
        """Store the labeler's message (none: ask again after a failure) and return (checkpoint, conversation)."""
        work = self._judgments.open(user_id, assignment_id)
        if work.assignment.state != "leased" or work.assignment.transcript is None:
            raise ConflictError("this item is not open")
        messages = list(work.assignment.transcript)
        if text.strip():
            if len(text) > MAX_MESSAGE or len(messages) >= 2 * MAX_TURNS:
                raise BadInputError("text: the message or the conversation is too long")
            messages.append({"role": "user", "content": text})
        if not messages or messages[-1]["role"] != "user":
            raise BadInputError("text: is empty")
        with self._lock:
            if assignment_id in self._busy:
                raise ConflictError("the model is still answering")
            self._busy.add(assignment_id)
        self._judgments.save_transcript(user_id, assignment_id, messages)
        return str(work.batch.settings.get("checkpoint", "")), messages

    async def reply(self, user_id: int, assignment_id: int, checkpoint: str, messages: Messages) -> AsyncIterator[str]:
        """The pieces of the reply as they come; it is finished and stored even if nobody listens any more."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None | Exception]()

        def tell(piece: str | Exception | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def work() -> None:
            said = model = ""
            try:
                for model, piece in self._reply(checkpoint, messages):  # noqa: B007 (stored with the reply)
                    said += piece
                    tell(piece)
                answer = [*messages, {"role": "assistant", "content": said, "model": model}]
                self._judgments.save_transcript(user_id, assignment_id, answer)
                tell(None)
            except Exception as error:  # whatever a checkpoint does, the labeler is told and the thread ends
                tell(error)
            finally:
                with self._lock:
                    self._busy.discard(assignment_id)

        threading.Thread(target=work, daemon=True).start()
        while (piece := await pieces.get()) is not None:
            if isinstance(piece, Exception):
                why = str(piece) if isinstance(piece, UserError) else f"{type(piece).__name__}: {piece}"
                yield f"\n\n[no reply: {why}]"
                return
            yield piece
