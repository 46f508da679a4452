"""The models behind the page of `align chat --web`: answers side by side, their figures, and items for labelers."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from align.commands.chat import ChatAnswer, ChatConfig, Scorer, Speaker
from align.core.errors import UserError
from align.core.plugins import require_extra
from align.core.tensor_ops import Padded
from align.data.conversation import Conversation, Message, check_conversation, to_json
from align.model_registry.registry import resolve_model
from align.models.backbone import is_encoder
from align.models.configs import base_of
from align.models.heads import LanguageModel, RewardModel
from align.sampling.generation import SamplingParams

if TYPE_CHECKING:
    from annotation_ui.store.database import Database

TRIES = 4
"""How often a model is asked for a different answer."""
FEWEST = 2
"""Fewest different answers of an item to rank."""


class TokenFigures(NamedTuple):
    """The texts of an answer's tokens, "" for a part of a character, and a number for each."""

    texts: list[str]
    values: list[float]


@dataclass(frozen=True)
class Figures:
    """Figures of one answer; None where no model gives them."""

    reward: float | None = None
    ratios: TokenFigures | None = None
    values: TokenFigures | None = None


@dataclass
class Histories:
    """The turns of each model's conversation, without the system message."""

    turns: list[list[Message]]
    answers: list[ChatAnswer | None] = field(default_factory=list)
    """The last answer of each model; None where there is none."""


class ChatRoom:
    """One or two models with their reference, reward model and value model."""

    def __init__(self, config: ChatConfig) -> None:
        self.config = config
        self.database = open_database(config.annotate) if config.annotate else None
        self._loaded: dict[str, Speaker] = {}
        self.speakers = [self._speaker(name) for name in config.model]
        self.references = [self._reference(speaker) for speaker in self.speakers]
        self.scorer = Scorer(config.reward_model, config.dtype) if config.reward_model else None
        self.value_scorer = Scorer(config.value_model, config.dtype) if config.value_model else self.scorer

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
            token_values(speaker, self.value_scorer, answer) if self.value_scorer else None,
        )

    def send(self, histories: Histories, system: str, sampling: SamplingParams) -> str:
        """Send the last answers to the labeling app as items of the task rank; return the name of the batch.

        Models that were asked the same share an item. An item with a single answer gets another one, which the models are
        asked for now.
        """
        if self.database is None:
            raise UserError("no database is given; start align chat with --annotate")
        items: list[tuple[Conversation, list[tuple[str, str]]]] = []
        for speaker, turns in zip(self.speakers, histories.turns, strict=True):
            if not turns or turns[-1]["role"] != "assistant":
                continue
            asked, pair = _conversation(system, turns[:-1]), (speaker.name, turns[-1]["content"])
            known = next((pairs for conversation, pairs in items if conversation == asked), None)
            if known is None:
                items.append((asked, [pair]))
            else:
                known.append(pair)
        if not items:
            raise UserError("there is no answer yet")
        from annotation_ui.store.importing import NewBatch, import_rows

        rows = []
        for number, (conversation, pairs) in enumerate(items, start=1):
            self._complete(conversation, pairs, sampling)
            models, responses = (list(column) for column in zip(*pairs, strict=True))
            row = {"prompt": to_json(conversation), "responses": responses, "model": models}
            rows.append((f"conversation {number}", row))
        name = f"chat {datetime.now():%Y-%m-%d %H:%M:%S} {secrets.token_hex(2)}"
        import_rows(self.database, NewBatch(name=name, task="rank"), rows)
        return name

    def _complete(self, conversation: Conversation, pairs: list[tuple[str, str]], sampling: SamplingParams) -> None:
        """Add answers until two differ; the models that have not answered are asked first."""
        present = {name for name, _ in pairs}
        order = sorted(self.speakers, key=lambda speaker: speaker.name in present)
        for speaker in order * TRIES:
            if len({text for _, text in pairs}) >= FEWEST:
                return
            with closing(speaker.answer(conversation, sampling)) as stream:  # type: ignore[type-var]
                answers = list(stream)
            pairs.append((speaker.name, answers[-1].text))
        if len({text for _, text in pairs}) < FEWEST:
            raise UserError("the models give the same answer every time; raise the temperature")


def _conversation(system: str, turns: Sequence[Message]) -> Conversation:
    begin: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
    return check_conversation([*begin, *turns], "messages")


def _with_answer(asked: list[Message], answer: ChatAnswer | None) -> list[Message]:
    return [*asked, {"role": "assistant", "content": answer.text}] if answer and answer.text else asked


def open_database(place: str) -> "Database":
    """Open the database of the labeling app and bring it to the newest schema.

    Args:
        place: a URL, an SQLite file, or the folder of `align annotate --data-dir`.
    """
    with require_extra("ui"):
        from annotation_ui.store.database import Database, sqlite_url
    kind, _, file = place.partition(":///")
    path = Path(file if kind == "sqlite" else place)
    if (kind == "sqlite" or ":" not in place) and not path.exists():
        raise UserError(f"annotate {place}: no such file or folder; give the folder of align annotate --data-dir")
    database = Database(place if ":" in place else sqlite_url(path) if path.is_dir() else f"sqlite:///{place}")
    database.upgrade()
    return database


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


@torch.no_grad()
def token_values(speaker: Speaker, scorer: Scorer, answer: ChatAnswer) -> TokenFigures:
    """Return the reward of the answer up to each token, in the tokens of the reward model."""
    loaded, model = scorer.reward.loaded, scorer.reward.model
    if is_encoder(loaded.backbone.model.config) or not isinstance(model, RewardModel):
        raise UserError("value_model: it scores whole answers only; give a decoder or an encoder-decoder with one label")
    encoded = scorer.of(speaker).encode(answer.row)
    prompt, response = (Padded.from_lists([ids]).to(loaded.backbone.device) for ids in encoded)
    with loaded.backbone.adapter(model.adapter_name):
        hidden = loaded.backbone.hidden(prompt, response)
    values = model.head(hidden[0, 1:]) - scorer.reward.mean
    return TokenFigures(loaded.tokenization.token_texts(encoded.response), values.tolist())
