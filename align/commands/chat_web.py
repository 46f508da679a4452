"""The web page of `align chat --web`: one or two conversations side by side with rewards and figures of each token."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from align.commands.chat import ChatAnswer, ChatConfig, Scorer, Speaker
from align.core.errors import UserError
from align.core.plugins import require_extra
from align.core.tensor_ops import Padded
from align.data.conversation import Conversation, Message, check_conversation
from align.model_registry.registry import registered_name, resolve_model
from align.models.configs import base_of
from align.models.heads import LanguageModel
from align.sampling.generation import SamplingParams

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when Gradio is imported
if TYPE_CHECKING:
    import gradio as gr

SECONDS_BETWEEN_UPDATES = 0.05
FULL_COLOR = 2.0
"""Log-ratio in nats that has the full color."""
ESCAPE = """<script>document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.querySelector("#stop")?.click();
});</script>"""


class TokenFigures(NamedTuple):
    """The texts of an answer's tokens, "" for a part of a character, and a number for each."""

    texts: list[str]
    values: list[float]


@dataclass(frozen=True)
class Figures:
    """Figures of one answer; None where no model gives them."""

    reward: float | None = None
    ratios: TokenFigures | None = None


@dataclass
class Histories:
    """The turns of each model's conversation, without the system message."""

    turns: list[list[Message]]
    answers: list[ChatAnswer | None] = field(default_factory=list)
    """The last answer of each model; None where there is none."""


class ChatRoom:
    """One or two models with their reference and a reward model."""

    def __init__(self, config: ChatConfig) -> None:
        self.config = config
        self._loaded: dict[str, Speaker] = {}
        self.speakers = [self._speaker(name) for name in config.model]
        self.references = [self._reference(speaker) for speaker in self.speakers]
        self.scorer = Scorer(config.reward_model, config.dtype) if config.reward_model else None

    def _speaker(self, name: str) -> Speaker:
        """A model, loaded once even if it is also a reference."""
        if name not in self._loaded:
            self._loaded[name] = Speaker(name, self.config.dtype, self.config.chat_template, self.config.seed)
        return self._loaded[name]

    def _reference(self, speaker: Speaker) -> Speaker | None:
        base, is_adapter = base_of(str(resolve_model(speaker.name)))
        name = self.config.reference or (base if is_adapter else "")
        if not name or name == speaker.name:
            return None
        reference = self._speaker(name)
        require_comparable(speaker, reference)
        return reference

    def empty(self) -> Histories:
        """Return the beginning of a conversation."""
        return Histories([[] for _ in self.speakers], [None] * len(self.speakers))

    def ask(self, histories: Histories, system: str, text: str, sampling: SamplingParams) -> Iterator[Histories]:
        """Yield the histories with the answers of all models to a message, longer with every token."""
        asked: list[list[Message]] = []
        for turns in histories.turns:  # the reader may have stopped a model before it began to answer
            answered = turns[:-1] if turns and turns[-1]["role"] == "user" else turns
            asked.append([*answered, {"role": "user", "content": text}])
        found: list[ChatAnswer | None] = [None] * len(self.speakers)
        yield Histories(asked, list(found))
        pairs = zip(self.speakers, asked, strict=True)
        streams = {i: speaker.answer(_conversation(system, turns), sampling) for i, (speaker, turns) in enumerate(pairs)}
        while streams:
            for number, stream in list(streams.items()):
                answer = next(stream, None)
                if answer is None:
                    del streams[number]
                else:
                    found[number] = answer
            yield Histories([_with_answer(*pair) for pair in zip(asked, found, strict=True)], list(found))

    def figures(self, number: int, answer: ChatAnswer) -> Figures:
        """Return the figures of an answer of model `number`."""
        speaker, reference = self.speakers[number], self.references[number]
        return Figures(
            self.scorer.score(speaker, answer) if self.scorer else None,
            log_ratios(speaker, reference, answer) if reference else None,
        )


def _conversation(system: str, turns: Sequence[Message]) -> Conversation:
    begin: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
    return check_conversation([*begin, *turns], "messages")


def _with_answer(asked: list[Message], answer: ChatAnswer | None) -> list[Message]:
    return [*asked, {"role": "assistant", "content": answer.text}] if answer and answer.text else asked


def require_comparable(speaker: Speaker, reference: Speaker) -> None:
    """Raise a UserError unless the reference reads the token ids of the model."""
    if not speaker.loaded.tokenization.reads_alike(reference.loaded.tokenization):
        raise UserError(
            f"reference {reference.name}: its tokenizer or chat template differs from that of {speaker.name}; give the "
            "model that training started from"
        )


@torch.no_grad()
def log_ratios(speaker: Speaker, reference: Speaker, answer: ChatAnswer) -> TokenFigures:
    """Return log pi(token) - log pi_ref(token) in nats at temperature 1; their sum is an estimate of the KL divergence."""
    prompt, response = Padded.from_lists([answer.prompt]), Padded.from_lists([answer.ids])
    models = [each.loaded.backbone for each in (speaker, reference)]
    ours, theirs = (LanguageModel(each)(prompt.to(each.device), response.to(each.device))[0].cpu() for each in models)
    return TokenFigures(speaker.loaded.tokenization.token_texts(answer.ids), (ours - theirs).tolist())


def serve(config: ChatConfig) -> None:
    """Serve the page until Ctrl-C."""
    with require_extra("ui"):
        import gradio  # noqa: F401  # before models are loaded
    page = start(ChatRoom(config))
    try:
        page.block_thread()
    finally:
        page.close()


def start(room: ChatRoom) -> "gr.Blocks":
    """Serve the page in the background and return it."""
    import gradio as gr

    config = room.config
    page = build_page(room)
    page.queue()
    try:
        page.launch(
            server_name=config.host,
            server_port=config.port,
            prevent_thread_lock=True,
            quiet=True,
            show_error=False,
            footer_links=[],
            run_history=False,
            pwa=False,
            ssr_mode=False,
            theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),  # none from the network
            head=ESCAPE,
        )
    except OSError as error:
        raise UserError(f"cannot listen on {config.host}:{config.port}; give another --port") from error
    print(f"chat with {' and '.join(config.model)} at http://{config.host}:{config.port}; stop it with Ctrl-C", flush=True)
    return page


class Column(NamedTuple):
    """The components of one model."""

    chat: Any
    facts: Any
    ratios: Any


def build_page(room: ChatRoom) -> "gr.Blocks":
    """Build the page."""
    import gradio as gr

    config = room.config
    with gr.Blocks(title="align chat", analytics_enabled=False, fill_width=True) as page:
        histories = gr.State(room.empty())
        with gr.Row():
            columns = [_column(room, number) for number in range(len(room.speakers))]
        status = gr.Markdown(elem_id="status")
        box = gr.Textbox(
            label="Message", placeholder="Enter sends, Shift+Enter begins a line, Escape stops", autofocus=True, max_lines=8
        )
        with gr.Row():
            send = gr.Button("Send", variant="primary")
            stop = gr.Button("Stop", variant="stop", elem_id="stop")
            reset = gr.Button("New conversation")
        with gr.Accordion("Settings", open=False):
            system = gr.Textbox(label="System message", value=config.system)
            with gr.Row():
                controls = [
                    gr.Number(label="Temperature", value=config.temperature, minimum=0, step=0.1),
                    gr.Number(label="Top p", value=config.top_p, minimum=0.01, maximum=1, step=0.05),
                    gr.Number(label="Top k", value=config.top_k, minimum=0, precision=0),
                    gr.Number(label="Longest answer, in tokens", value=config.max_new_tokens, minimum=1, precision=0),
                ]
        handlers = Handlers(room, columns, histories, status, box)
        shown = [part for column in columns for part in column]
        given, outputs = [histories, system, *controls], [histories, status, box, *shown]
        # One concurrency_id: these events run one after the other.
        options: dict[str, Any] = {"show_progress": "hidden", "concurrency_id": "models", "api_visibility": "private"}
        asked: list[Any] = [event(handlers.ask, [box, *given], outputs, **options) for event in (box.submit, send.click)]
        stop.click(None, cancels=asked)
        for event in (reset.click, *(column.chat.clear for column in columns)):
            event(handlers.reset, None, outputs, cancels=asked, **options)  # after the answer that it cancels
    return cast("gr.Blocks", page)


def _column(room: ChatRoom, number: int) -> Column:
    import gradio as gr

    speaker, reference = room.speakers[number], room.references[number]
    compared = (registered_name(reference.name) or reference.name) if reference else "no reference"
    with gr.Column():
        chat = gr.Chatbot(label=speaker.name, height=420, elem_id=f"chat-{number}", buttons=["copy"], allow_tags=False)
        facts = gr.Markdown(elem_id=f"facts-{number}")
        ratios = gr.HighlightedText(
            label=f"log-ratio to {compared} (violet: likelier, red: less likely; full color at {FULL_COLOR:g} nats)",
            visible=reference is not None,
            elem_id=f"ratios-{number}",
        )
    return Column(chat, facts, ratios)


class Handlers:
    """The functions of the page's events; outputs are dicts by component."""

    def __init__(self, room: ChatRoom, columns: Sequence[Column], histories: Any, status: Any, box: Any) -> None:
        self.room, self.columns, self.histories, self.status, self.box = room, columns, histories, status, box

    def ask(self, text: str, histories: Histories, system: str, *controls: float) -> Iterator[dict[Any, Any]]:
        """Stream the answers to a message, then show their figures."""
        if not text.strip():
            yield {self.status: "Write a message first."}
            return
        now, shown_at = histories, 0.0
        yield self._without_figures() | {self.box: ""}
        try:
            for now in self.room.ask(histories, system, text, self._sampling(controls)):
                if time.monotonic() > shown_at + SECONDS_BETWEEN_UPDATES:
                    yield self._shown(now)
                    shown_at = time.monotonic()
            yield self._shown(now)
            for number, answer in enumerate(now.answers):
                if answer:
                    yield self._figures(number, answer, self.room.figures(number, answer))
        except UserError as error:
            kept = now.turns if any(now.answers) and now is not histories else histories.turns
            yield self._shown(replace(now, turns=kept)) | {self.status: f"**{error}**"}

    def reset(self) -> dict[Any, Any]:
        """Begin a new conversation."""
        return self._shown(self.room.empty()) | self._without_figures()

    def _without_figures(self) -> dict[Any, Any]:
        empty = {part: value for column in self.columns for part, value in ((column.ratios, None), (column.facts, ""))}
        return empty | {self.status: ""}

    def _sampling(self, controls: Sequence[float]) -> Any:
        temperature, top_p, top_k, longest = controls
        changed = replace(
            self.room.config, temperature=temperature, top_p=top_p, top_k=int(top_k), max_new_tokens=int(longest)
        )
        return changed.sampling

    def _shown(self, histories: Histories) -> dict[Any, Any]:
        return {self.histories: histories} | {
            column.chat: turns for column, turns in zip(self.columns, histories.turns, strict=True)
        }

    def _figures(self, number: int, answer: ChatAnswer, figures: Figures) -> dict[Any, Any]:
        column, shown = self.columns[number], {}
        facts = [] if answer.text else ["the answer is empty"]
        if figures.reward is not None:
            facts.append(f"reward {figures.reward:.3f}")
        if figures.ratios:
            total = sum(figures.ratios.values)
            facts.append(f"log-ratio {total:.2f} nats over {len(figures.ratios.values)} tokens")
            shown[column.ratios] = colored(figures.ratios)
        return {column.facts: " · ".join(facts)} | shown


def colored(figures: TokenFigures) -> list[tuple[str, float]]:
    """Return the tokens with numbers from -1 to 1; `FULL_COLOR` and more is 1."""
    pairs = zip(figures.texts, figures.values, strict=True)
    return [(text, max(-1.0, min(1.0, value / FULL_COLOR))) for text, value in pairs if text]
