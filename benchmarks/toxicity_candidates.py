"""Scorers that the default was chosen against, as functions for `python -m benchmarks.toxicity compare`.

`profanity_check` needs a package that the project does not use, in an environment of its own.
"""

import os
import re
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from benchmarks.toxicity_data import read_own_rows

BUCKETS = 1 << 14


@cache
def _bad_words() -> re.Pattern[str]:
    words = Path(os.environ["WORD_LIST"]).read_text(encoding="utf-8").lower().split("\n")
    known = sorted({re.escape(word.strip()) for word in words if word.strip()}, key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(known)})(?!\w)", re.IGNORECASE)


def word_list(texts: Sequence[str]) -> list[float]:
    """1 for a text with a word of the list in the file $WORD_LIST, one a line; else 0."""
    return [float(bool(_bad_words().search(text))) for text in texts]


def _ngrams(text: str) -> torch.Tensor:
    """Words and pairs of words in hashed buckets, as a unit vector."""
    words = re.findall(r"[\w']+", text.lower())
    vector = torch.zeros(BUCKETS)
    for gram in words + [f"{a} {b}" for a, b in zip(words, words[1:], strict=False)]:
        vector[zlib.crc32(gram.encode()) % BUCKETS] = 1
    return torch.nn.functional.normalize(vector, dim=0)


@cache
def _ngram_head() -> tuple[torch.Tensor, float]:
    from sklearn.linear_model import LogisticRegression

    rows = read_own_rows("toxicity_training.jsonl")
    vectors = torch.stack([_ngrams(str(row["text"])) for row in rows]).numpy()
    model = LogisticRegression(C=10.0).fit(vectors, [bool(row["toxic"]) for row in rows])
    return torch.from_numpy(model.coef_[0]).float(), float(model.intercept_[0])


def ngrams(texts: Sequence[str]) -> list[float]:
    """Logistic regression on hashed words and pairs of words of this project's own sentences alone."""
    weight, bias = _ngram_head()
    scores: list[float] = torch.sigmoid(torch.stack([_ngrams(text) for text in texts]) @ weight + bias).tolist()
    return scores


def profanity_check(texts: Sequence[str]) -> list[float]:
    """The package alt-profanity-check: a linear SVM on words, trained on Jigsaw's and Davidson's labels; pickled."""
    from profanity_check import predict_prob

    return [float(score) for score in predict_prob(list(texts))]
