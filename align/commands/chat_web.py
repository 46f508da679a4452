"""The web page of `align chat --web`: one or two conversations side by side with rewards and figures of each token."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from align.commands.chat import ChatAnswer, ChatConfig
from align.commands.chat_room import ChatRoom, Figures, Histories, TokenFigures
from align.core.errors import UserError
from align.core.plugins import require_extra
from align.model_registry.registry import registered_name

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when Gradio is imported
if TYPE_CHECKING:
    import gradio as gr

SECONDS_BETWEEN_UPDATES = 0.05
FULL_COLOR = 2.0
"""Log-ratio in nats that has the full color."""
ESCAPE = """<script>document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.querySelector("#stop")?.click();
});</script>"""


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
    values: Any


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
            label = gr.Button("Send to labelers", visible=room.database is not None)
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
        asked = [event(handlers.ask, [box, *given], outputs, **options) for event in (box.submit, send.click)]
        labeled = label.click(handlers.send_to_labelers, given, [status], **options)
        running: list[Any] = [*asked, labeled]
        stop.click(None, cancels=running)
        for event in (reset.click, *(column.chat.clear for column in columns)):
            event(handlers.reset, None, outputs, cancels=running, **options)  # after the answer that it cancels
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
        values = gr.HighlightedText(
            label="reward up to each token (violet: positive, red: negative; full color at the largest)",
            visible=room.value_scorer is not None,
            elem_id=f"values-{number}",
        )
    return Column(chat, facts, ratios, values)


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

    def send_to_labelers(self, histories: Histories, system: str, *controls: float) -> dict[Any, Any]:
        """Send the last answers to the labeling app."""
        try:
            name = self.room.send(histories, system, self._sampling(controls))
        except UserError as error:
            return {self.status: f"**{error}**"}
        return {self.status: f"Sent to labelers as batch “{name}”."}

    def reset(self) -> dict[Any, Any]:
        """Begin a new conversation."""
        return self._shown(self.room.empty()) | self._without_figures()

    def _without_figures(self) -> dict[Any, Any]:
        figures = {part: None for column in self.columns for part in (column.ratios, column.values)}
        return figures | {column.facts: "" for column in self.columns} | {self.status: ""}

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
            shown[column.ratios] = colored(figures.ratios, FULL_COLOR)
        if figures.values:
            shown[column.values] = colored(figures.values, max(map(abs, figures.values.values), default=1.0) or 1.0)
        return {column.facts: " · ".join(facts)} | shown


def colored(figures: TokenFigures, full: float) -> list[tuple[str, float]]:
    """Return the tokens with numbers from -1 to 1; `full` and more is 1."""
    pairs = zip(figures.texts, figures.values, strict=True)
    return [(text, max(-1.0, min(1.0, value / full))) for text, value in pairs if text]
