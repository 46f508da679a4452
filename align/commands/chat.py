"""`align chat`: chat with one or two models in the terminal."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Literal, cast

import torch
from torch import Tensor

from align.commands.sample import scorer_of
from align.core.errors import UserError
from align.core.seeds import RngStream
from align.core.settings import QuantizationConfig, option, require_setting
from align.core.tensor_ops import Padded
from align.data.conversation import Message, check_conversation
from align.models.backbone import Backbone
from align.models.loading import load_frozen
from align.reward.checkpoint import LoadedReward, load_reward_model, require_reward_model
from align.runtime.progress import console
from align.sampling.generation import SamplingParams, draw, row_uniforms, warpers_of
from align.tokenization.encoded import SampledResponse

HELP = "/reset starts a new conversation, /system TEXT sets the system message, Ctrl-C stops an answer, Ctrl-D exits"
MODELS = 2
"""Maximum number of models side by side."""
REWARD_TOKENS = 8192
"""Maximum padded tokens per reward model batch."""
UNFINISHED = "\ufffd"
"""Replacement character that a decoder emits for an incomplete character."""


@dataclass(kw_only=True)
class ChatConfig(QuantizationConfig):
    """Chat with one or two models."""

    model: list[str] = option([], "One or two models: local folder, Hub id or built-in model.", required=True)
    system: str = option("", "System message.")
    max_new_tokens: int = option(512, "Maximum response length, in tokens.", gt=0)
    temperature: float = option(0.7, "Sampling temperature. 0 for greedy decoding.", ge=0)
    top_k: int = option(0, "Top-k sampling. 0 disables it.", ge=0)
    top_p: float = option(1.0, "Nucleus (top-p) sampling. 1 disables it.", gt=0, le=1)
    seed: int = option(0, "Random seed. The same seed and messages give the same responses.", ge=0, lt=2**32)
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Compute dtype. auto selects bfloat16 if the hardware supports it, else float32."
    )
    chat_template: str = option(
        "auto",
        "Chat template: auto, plain, raw, a template name or the path of a Jinja file. Set template variables in "
        "brackets: auto[VARIABLE=VALUE, ...].",
    )
    reward_model: str = option("", "Reward model folder. Scores each response.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "model", len(self.model) <= MODELS, "one or two models")


class Speaker:
    """A model (local folder, Hub id or built-in model) that answers conversations."""

    def __init__(
        self, name: str, dtype: str = "auto", chat_template: str = "auto", seed: int = 0, quantization: str = ""
    ) -> None:
        self.name, self.seed, self._numbers = name, seed, count()
        self.loaded = load_frozen(name, dtype, chat_template, quantization=quantization)

    def answer(self, messages: Sequence[Message], sampling: SamplingParams) -> Iterator[SampledResponse]:
        """Yield the growing answer after every token. Closing the iterator stops sampling.

        Until the answer is complete, an incomplete character at its end is left out of the text.
        """
        conversation = check_conversation(list(messages), "messages")
        tokenization, backbone = self.loaded.tokenization, self.loaded.backbone
        prompt = tokenization.prompt_ids(conversation)
        if not backbone.fits(len(prompt), sampling.max_new_tokens):
            raise UserError(
                f"the conversation has {len(prompt)} tokens; with an answer of {sampling.max_new_tokens}, it exceeds the "
                f"context length ({backbone.context_length}); start a new conversation or lower max_new_tokens"
            )
        uniforms = row_uniforms(1, sampling, self.seed, RngStream.CHAT, next(self._numbers))
        ids: list[int] = []
        for token in stream_tokens(backbone, prompt, uniforms, sampling, tokenization.end_ids):
            ids.append(token)
            yield SampledResponse(conversation, prompt, list(ids), tokenization.text(ids).rstrip(UNFINISHED), False)
        yield SampledResponse(conversation, prompt, ids, tokenization.text(ids), tokenization.has_ended(ids))


def run_chat(config: ChatConfig) -> None:
    """Chat in the terminal until Ctrl-D."""
    if config.reward_model:
        require_reward_model(config.reward_model)
    scorer = (config.reward_model, config.dtype, config.chat_template)
    console.print(f"loading {', '.join(filter(None, [*config.model, config.reward_model]))}")  # takes 10 s or more
    reward = load_reward_model(*scorer, quantization=config.quantization) if config.reward_model else None
    how = (config.dtype, config.chat_template, config.seed, config.quantization)
    speakers = [Speaker(name, *how) for name in config.model]
    with suppress(ImportError):
        import readline  # noqa: F401  # line editing
    sampling = SamplingParams(config.max_new_tokens, config.temperature, config.top_k, config.top_p)
    Terminal(speakers, sampling, config.system, reward).run()


class Terminal:
    """A chat session. Each model sees only its earlier answers. A reward model may score them."""

    def __init__(
        self, speakers: Sequence[Speaker], sampling: SamplingParams, system: str, reward: LoadedReward | None
    ) -> None:
        self.speakers, self.sampling, self.reward = speakers, sampling, reward
        self.reset(system)

    def reset(self, system: str) -> None:
        """Start a new conversation."""
        self.system = system
        begin: list[Message] = [{"role": "system", "content": system}] if system else []
        self.histories = [list(begin) for _ in self.speakers]

    def run(self) -> None:
        """Read and answer lines until the input ends."""
        prompt = "> " if sys.stdin.isatty() else ""
        if prompt:
            print(HELP)
        while True:
            try:
                line = input(prompt).strip()
                if line.startswith("/"):
                    self.command(*line.split(maxsplit=1))
                elif line:
                    self.say(line)
            except EOFError:
                print(end="\n" if prompt else "")
                return
            except KeyboardInterrupt:  # also right after an answer
                print(f"\n{HELP}")

    def command(self, name: str, text: str = "") -> None:
        """Execute a slash command."""
        if name == "/reset":
            self.reset(self.system)
        elif name == "/system":
            self.reset(text)
        else:
            print(HELP)

    def say(self, text: str) -> None:
        """Print each model's answer to a message. A turn without an answer is discarded."""
        for speaker, history in zip(self.speakers, self.histories, strict=True):
            if len(self.speakers) > 1:
                print(f"[{speaker.name}] ", end="", flush=True)
            history.append({"role": "user", "content": text})
            answer = self._stream(speaker, history)
            if answer is None or not answer.text:
                history.pop()
            else:
                history.append({"role": "assistant", "content": answer.text})

    def _stream(self, speaker: Speaker, history: list[Message]) -> SampledResponse | None:
        """Print an answer while it is sampled. Return what was sampled before Ctrl-C or an error."""
        answer, printed = None, 0
        try:
            for answer in speaker.answer(history, self.sampling):
                print(answer.text[printed:], end="", flush=True)
                printed = max(printed, len(answer.text))
            if self.reward and answer:
                (score,) = scorer_of(speaker.loaded, self.reward, REWARD_TOKENS)([answer])
                print(f"\n(reward {score:.3f})", end="")
        except KeyboardInterrupt:
            print(" (stopped)", end="")
        except UserError as error:
            print(f"error: {error}", end="")
        print(flush=True)
        return answer


@torch.no_grad()
def stream_tokens(
    backbone: Backbone, prompt: Sequence[int], uniforms: Tensor, sampling: SamplingParams, end_ids: frozenset[int]
) -> Iterator[int]:
    """Yield the tokens of a response, identical to the output of `sample`. Closing the iterator stops sampling.

    Args:
        backbone: model to sample from.
        prompt: nonempty list of token ids.
        uniforms: random numbers [1, max_new_tokens] from `row_uniforms`.
        sampling: sampling settings.
        end_ids: tokens that end a response. The end token is yielded as well.
    """
    backbone.model.eval()
    warpers, uniforms = warpers_of(sampling), uniforms.to(backbone.device)
    state, hidden = backbone.prefill(Padded.from_lists([prompt]).to(backbone.device))
    tokens = torch.zeros(1, sampling.max_new_tokens, dtype=torch.long, device=backbone.device)
    for step in range(sampling.max_new_tokens):
        logits = backbone.logits(hidden).float()
        if sampling.temperature == 0:
            chosen = logits.argmax(-1)
        else:
            seen = cast(torch.LongTensor, tokens[:, :step])
            chosen = draw(warpers(seen, logits / sampling.temperature), uniforms[:, step])
        tokens[:, step] = chosen
        token = int(chosen)
        yield token
        if token in end_ids or step + 1 == sampling.max_new_tokens:
            return
        hidden = backbone.decode_step(state, chosen)
