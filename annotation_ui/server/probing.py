"""Conversations with a model. A separate thread waits for each reply, so server threads are not blocked.

The conversation is stored in the assignment's `transcript`, which only this module writes. A labeler's message is stored
when it arrives, and a reply when it is complete. A disconnected browser or a server crash therefore loses no complete
message.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from align.core.errors import UserError
from annotation_ui.server.checkpoints import Piece
from annotation_ui.store.judgments import ConflictError, Judgments
from annotation_ui.tasks.base import BadInputError
from annotation_ui.tasks.probe import MAX_NEW_TOKENS

Messages = list[dict[str, Any]]
Reply = Callable[[str, Messages, int], Iterator[Piece]]  # (checkpoint, conversation, maximum tokens) -> pieces

MAX_MESSAGE = 20_000
MAX_TURNS = 50


class Probing:
    """Manages labelers' conversations with a model. `reply` generates the model's replies (see `checkpoints`)."""

    def __init__(self, judgments: Judgments, reply: Reply) -> None:
        self._judgments = judgments
        self._reply = reply
        # Assignments whose reply is being generated. Not stored, because the threads do not outlive the process.
        self._busy: set[int] = set()
        self._lock = threading.Lock()

    def add_message(self, user_id: int, assignment_id: int, text: str) -> tuple[str, Messages, int]:
        """Store the labeler's message. Return the batch's checkpoint, the conversation, and the reply's token limit.

        An empty message requests the reply again after a failure.
        """
        context = self._judgments.load(user_id, assignment_id)
        if context.assignment.state != "leased" or context.assignment.transcript is None:
            raise ConflictError("the item is not open")
        messages = list(context.assignment.transcript)
        if text.strip():
            if messages and not messages[-1]["content"].strip():  # training rejects conversations with an empty turn
                raise BadInputError("the model's reply is empty; judge it, or skip the item")
            if len(text) > MAX_MESSAGE or len(messages) >= 2 * MAX_TURNS:
                raise BadInputError("text: the message or the conversation is too long")
            messages.append({"role": "user", "content": text})
        if not messages or messages[-1]["role"] != "user":
            raise BadInputError("text: is empty")
        with self._lock:
            if assignment_id in self._busy:
                raise ConflictError("the model is still answering")
            self._busy.add(assignment_id)
        try:
            self._judgments.save_transcript(user_id, assignment_id, messages)
        except BaseException:  # such as a full disk; the labeler can send the message again
            self._end_reply(assignment_id)
            raise
        settings = context.batch.settings
        return str(settings.get("checkpoint", "")), messages, int(settings.get("max_new_tokens", MAX_NEW_TOKENS))

    def is_answering(self, assignment_id: int) -> bool:
        """Return whether a reply is being generated. It stays true until the conversation is stored."""
        with self._lock:
            return assignment_id in self._busy

    def stream_reply(
        self, user_id: int, assignment_id: int, checkpoint: str, messages: Messages, max_new_tokens: int
    ) -> AsyncIterator[str]:
        """Start generating a reply, and return its pieces. The reply is stored even if the pieces are not read."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None | Exception]()

        def put_piece(piece: str | Exception | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def generate_reply() -> None:
            reply: dict[str, Any] = {"role": "assistant", "content": "", "model": ""}
            try:
                for model, piece, cut in self._reply(checkpoint, messages, max_new_tokens):
                    reply |= {"content": reply["content"] + piece, "model": model} | ({"cut": True} if cut else {})
                    put_piece(piece)
                answered = [*messages, reply]
                self._judgments.save_transcript(user_id, assignment_id, answered)
                put_piece(None)
            except Exception as error:  # reported to the labeler
                put_piece(error)
            finally:
                self._end_reply(assignment_id)

        async def read_pieces() -> AsyncIterator[str]:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, Exception):
                    reason = str(piece) if isinstance(piece, UserError) else f"{type(piece).__name__}: {piece}"
                    yield f"\n\n[no reply: {reason}]"
                    return
                yield piece

        threading.Thread(target=generate_reply, daemon=True).start()
        return read_pieces()

    def _end_reply(self, assignment_id: int) -> None:
        with self._lock:
            self._busy.discard(assignment_id)
