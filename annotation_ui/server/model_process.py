"""Runs one model in its own process: loading, generating or a crash never delays a labeler.

    python -m annotation_ui.server.model_process NAME

It reads and writes JSON, one object per line. First it writes {"ready": description} or {"error": reason}. For each
{"messages": [...]} that it reads, it writes any number of {"piece": text}, then {"done": true} or {"error": reason}. It
stops when its input ends, so it never outlives the server.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from align.core.errors import UserError
from align.model_registry.registry import resolve_model

MAX_NEW_TOKENS = 256
TEMPERATURE = 0.7
NICENESS = 5  # the server answers labelers first


class ChatModel:
    """Any model that `align sample` takes, for conversations."""

    def __init__(self, name: str) -> None:
        resolve_model(name)  # what leads nowhere is refused before the imports below, which take seconds
        import torch

        from align.core.settings import ModelConfig
        from align.models.loading import load
        from align.runtime.distributed import compute_dtype

        self.loaded = load(ModelConfig(model=name), compute_dtype("auto"))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.loaded.backbone.to(device).eval().requires_grad_(False)

    def __str__(self) -> str:
        model: Any = self.loaded.backbone.model
        size = sum(weight.numel() for weight in model.parameters())
        count = f"{size / 1e6:,.0f} million" if size >= 1e6 else f"{size:,}"
        return f"{type(model).__name__}, {count} weights, {str(model.dtype).removeprefix('torch.')} on {model.device.type}"

    def reply(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Sample a reply and yield its pieces as they are generated."""
        import torch
        from transformers import TextIteratorStreamer

        from align.data.conversation import check_conversation

        model: Any = self.loaded.backbone.model
        tokenization = self.loaded.tokenization
        ids = tokenization.prompt_ids(check_conversation(messages, "messages"))
        if not self.loaded.backbone.fits(len(ids), MAX_NEW_TOKENS):
            raise UserError("the conversation is longer than the model can read: start a new one")
        prompt = torch.tensor([ids], device=model.device)
        has_prompt = not model.config.is_encoder_decoder  # a decoder's output begins with its prompt
        streamer = TextIteratorStreamer(tokenization.tokenizer, skip_prompt=has_prompt, skip_special_tokens=True)
        errors: list[Exception] = []

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
            except Exception as error:  # raised again below; without `end` the loop below would wait forever
                errors.append(error)
                streamer.end()

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        yield from streamer
        thread.join()
        if errors:
            raise errors[0]


def one_line(error: BaseException) -> str:
    """The first line of an error's message, with its type unless it is a UserError."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"


def main() -> None:
    """Load the model named on the command line and answer conversations until the input ends."""
    os.nice(NICENESS)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not reach the server

    def write_message(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        model = ChatModel(sys.argv[1])
    except Exception as error:
        write_message(error=one_line(error))
        return
    write_message(ready=str(model))
    for line in sys.stdin:
        try:
            for piece in model.reply(json.loads(line)["messages"]):
                write_message(piece=piece)
            write_message(done=True)
        except BrokenPipeError:  # the server has ended
            return
        except Exception as error:
            write_message(error=one_line(error))


if __name__ == "__main__":
    main()
