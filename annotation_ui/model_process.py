"""One model in a process of its own, so that whatever it does holds up no labeler: loading, thinking, dying.

    python -m annotation_ui.model_process NAME

Speaks JSON, one object a line. Out, once: {"ready": what was loaded} or {"error": why not}. In: {"messages": [...]}.
Out, for each: any number of {"piece": text}, then {"done": true} or {"error": why}. It ends with its input: with the
server, however that ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from align.errors import UserError

MAX_NEW_TOKENS = 256
TEMPERATURE = 0.7
NICENESS = 5  # labelers come first


class Speaker:
    """Any model that `align sample` takes, answering conversations.

    Raises:
        UserError: if the model cannot be had, or a conversation is longer than it can read.
    """

    def __init__(self, name: str) -> None:
        import torch

        from align.config import ModelConfig
        from align.distributed import compute_dtype
        from align.models.loading import load

        self.loaded = load(ModelConfig(model=name), compute_dtype("auto"))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.loaded.backbone.to(device).eval().requires_grad_(False)

    def __str__(self) -> str:
        model: Any = self.loaded.backbone.model
        size = sum(weight.numel() for weight in model.parameters())
        count = f"{size / 1e6:,.0f} million" if size >= 1e6 else f"{size:,}"
        return f"{type(model).__name__}, {count} weights, {str(model.dtype).removeprefix('torch.')} on {model.device.type}"

    def reply(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The pieces of a sampled reply as they come."""
        import torch
        from transformers import TextIteratorStreamer

        from align.data.conversation import check_conversation

        model: Any = self.loaded.backbone.model
        tokenization = self.loaded.tokenization
        ids = tokenization.prompt_ids(check_conversation(messages, "messages"))
        if not self.loaded.backbone.fits(len(ids), MAX_NEW_TOKENS):
            raise UserError("the conversation is longer than the model can read: begin a new one")
        prompt = torch.tensor([ids], device=model.device)
        echoes = not model.config.is_encoder_decoder  # a decoder's output begins with its prompt
        streamer = TextIteratorStreamer(tokenization.tokenizer, skip_prompt=echoes, skip_special_tokens=True)
        failed: list[Exception] = []

        def generate() -> None:
            try:
                model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    streamer=streamer,
                    max_new_tokens=MAX_NEW_TOKENS,
                    do_sample=True,
                    temperature=TEMPERATURE,
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


def in_words(error: BaseException) -> str:
    """An error as one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"


def main() -> None:
    os.nice(NICENESS)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is not for the server

    def tell(**said: Any) -> None:
        out.write(json.dumps(said) + "\n")
        out.flush()

    try:
        speaker = Speaker(sys.argv[1])
    except Exception as error:
        tell(error=in_words(error))
        return
    tell(ready=str(speaker))
    for line in sys.stdin:
        try:
            for piece in speaker.reply(json.loads(line)["messages"]):
                tell(piece=piece)
            tell(done=True)
        except BrokenPipeError:  # the server has gone
            return
        except Exception as error:
            tell(error=in_words(error))


if __name__ == "__main__":
    main()
