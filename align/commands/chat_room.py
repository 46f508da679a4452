"""The models behind the page of `align chat --web`: answers side by side, their figures, and items for labelers."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from align.commands.chat import ChatAnswer, ChatConfig, Scorer, Speaker
from align.commands.chat_labels import open_database, send_answers
from align.commands.chat_scores import TokenFigures, log_ratios, require_comparable, token_values
from align.core.errors import UserError
from align.data.conversation import Conversation, Message, check_conversation
from align.model_registry.registry import resolve_model
from align.models.configs import base_of
from align.sampling.generation import SamplingParams

TRIES = 4
"""How often a model is asked for a different answer."""
FEWEST = 2
"""Fewest different answers of an item to rank."""


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
    """One or two models with their reference, reward model and value model.

    Raises:
        UserError: if a model or the database cannot be opened, or a reference has another tokenizer.
    """

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
        """Yield the histories with the answers of all models to a message, longer with every token.

        Raises:
            UserError: if a conversation cannot be answered.
        """
        asked: list[list[Message]] = [[*_answered(turns), {"role": "user", "content": text}] for turns in histories.turns]
        yield Histories(asked, [None] * len(asked))
        found: list[ChatAnswer | None] = [None] * len(self.speakers)
        streams = dict(enumerate(self._answers(asked, system, sampling)))
        while streams:
            for number, stream in list(streams.items()):
                answer = next(stream, None)
                if answer is None:
                    del streams[number]
                else:
                    found[number] = answer
            yield Histories([_with_answer(*pair) for pair in zip(asked, found, strict=True)], list(found))

    def _answers(self, asked: Sequence[list[Message]], system: str, sampling: SamplingParams) -> list[Iterator[ChatAnswer]]:
        pairs = zip(self.speakers, asked, strict=True)
        return [speaker.answer(_conversation(system, turns), sampling) for speaker, turns in pairs]

    def figures(self, number: int, answer: ChatAnswer) -> Figures:
        """Return the figures of an answer of model `number`.

        Raises:
            UserError: if the value model cannot be read token by token.
        """
        speaker, reference = self.speakers[number], self.references[number]
        return Figures(
            self.scorer.score(speaker, answer) if self.scorer else None,
            log_ratios(speaker, reference, answer) if reference else None,
            token_values(speaker, self.value_scorer, answer) if self.value_scorer else None,
        )

    def send(self, histories: Histories, system: str, sampling: SamplingParams) -> str:
        """Send the last answers to the labeling app; return the name of the batch.

        Models that were asked the same share an item. An item with a single answer gets another one, which the models are
        asked for now.

        Raises:
            UserError: if there is no answer, no different one, or no database.
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
        for conversation, pairs in items:
            self._complete(conversation, pairs, sampling)
        return send_answers(self.database, items)

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


def _answered(turns: list[Message]) -> list[Message]:
    """The turns without a last message that has no answer, because the reader stopped it."""
    return turns[:-1] if turns and turns[-1]["role"] == "user" else turns


def _with_answer(asked: list[Message], answer: ChatAnswer | None) -> list[Message]:
    return [*asked, {"role": "assistant", "content": answer.text}] if answer and answer.text else asked
