"""Talking to a checkpoint: replies are made in a thread of their own and streamed without holding one of the server's.

The conversation is kept in the assignment's `transcript`, which only this module writes: a labeler's message when it
arrives, the reply when it is complete. A browser that goes away, or a server that dies, loses no complete message.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from annotation_ui.judgments import ConflictError, Judgments
from annotation_ui.tasks.base import BadInputError

if TYPE_CHECKING:  # torch takes seconds to import, and most servers never probe
    from align.models.loading import Loaded

Messages = list[dict[str, str]]
Stream = Callable[[str, Messages], Iterator[str]]  # (checkpoint, conversation) -> pieces of the reply

MAX_MESSAGE = 20_000
MAX_TURNS = 50


class Probing:
    """Replies of checkpoints to labelers; one reply is made at a time, the others wait their turn."""

    def __init__(self, judgments: Judgments, stream: Stream) -> None:
        self._judgments = judgments
        self._stream = stream
        self._model = threading.Semaphore(1)
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
            said = ""
            try:
                with self._model:
                    for piece in self._stream(checkpoint, messages):
                        said += piece
                        tell(piece)
                answer = [*messages, {"role": "assistant", "content": said}]
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
                yield f"\n\n[no reply: {type(piece).__name__}: {piece}]"
                return
            yield piece


class TransformersStream:
    """The default stream: any model that `align sample` takes, kept in memory while the same one is asked for."""

    def __init__(self, max_new_tokens: int = 256, temperature: float = 0.7) -> None:
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self._kept: tuple[str, Loaded] | None = None

    def __call__(self, checkpoint: str, messages: Messages) -> Iterator[str]:
        import torch
        from transformers import TextIteratorStreamer

        from align.data.conversation import check_conversation

        loaded = self._load(checkpoint)
        model: Any = loaded.backbone.model
        tokenization = loaded.tokenization
        echoes = not model.config.is_encoder_decoder  # a decoder's output begins with its prompt
        streamer = TextIteratorStreamer(tokenization.tokenizer, skip_prompt=echoes, skip_special_tokens=True)
        prompt = torch.tensor([tokenization.prompt_ids(check_conversation(messages, "messages"))])
        failed: list[Exception] = []

        def generate() -> None:
            try:
                model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    streamer=streamer,
                    max_new_tokens=self.max_new_tokens,
                    do_sample=True,
                    temperature=self.temperature,
                    eos_token_id=sorted(tokenization.end_ids),
                    pad_token_id=tokenization.pad_id,
                )
            except Exception as error:  # handed to the reader, who would wait for ever otherwise
                failed.append(error)
                streamer.end()

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        yield from streamer
        thread.join()
        if failed:
            raise failed[0]

    def _load(self, checkpoint: str) -> Loaded:
        import torch

        from align.config import ModelConfig
        from align.models.loading import load

        if self._kept is None or self._kept[0] != checkpoint:
            self._kept = None  # before the next one is loaded: two may not fit
            loaded = load(ModelConfig(model=checkpoint), torch.float32)
            loaded.backbone.eval()
            self._kept = (checkpoint, loaded)
        return self._kept[1]
