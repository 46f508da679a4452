"""A model of toxic words that the default scorer's n-grams imitate: tox-block 0.1.2 from PyPI (MIT).

It is an LSTM that its author trained on Jigsaw's Wikipedia comments (Toxic Comment Classification Challenge, 2018; CC0),
whose raters answered nearly the question that Perspective's did. Only the training of the default scorer reads it. Its
files are a pickle, of which nothing but containers is made, and HDF5; TensorFlow is not needed.
"""

import ast
import pickle
import re
import tempfile
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
import torch
from torch import Tensor

from align.builtin.wheels import fetch_wheel

WHEEL = (
    "tox-block",
    "0.1.2",
    "ed3a934f77d456f5324a6ae1b55bd9a3d404f6ebdb30aedad73dea5a2f01b7ed",
)  # its sha256 as PyPI serves it, computed here
VOCABULARY, LENGTH, UNITS = 20_000, 100, 50
"""Its words, the last tokens of a text that it reads, and units of its LSTM for each direction."""
NO_WORD = str.maketrans(dict.fromkeys('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n', " "))
NO_TEXT = re.compile(r"\n|\d{1,3}(?:\.\d{1,3}){3}|http://\S*")  # line breaks, addresses of computers and of pages


class Teacher:
    """Texts to its logits of "toxic".

    Attributes:
        words: its vocabulary, most frequent first.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as work:
            wheel = fetch_wheel(*WHEEL, "training the toxicity scorer", Path(work))
            with zipfile.ZipFile(wheel) as archive:
                with archive.open("tox_block/trained_models/encoder_0.1.2.pkl") as file:
                    index = _word_index(file)
                with archive.open("tox_block/trained_models/lstm_model_0.1.2.h5") as file:
                    weights = _weights(file)
                self.stop_words = _stop_words(archive.read("tox_block/config/config.py").decode())
        self.index = {word: number for word, number in index.items() if number < VOCABULARY}
        self.words = list(self.index)
        self.embedding = weights["embedding"]
        self.lstm = torch.nn.LSTM(UNITS, UNITS, bidirectional=True, batch_first=True)
        self.lstm.load_state_dict({name: tensor for name, tensor in weights.items() if name.endswith(("_l0", "_reverse"))})
        self.hidden = (weights["dense/kernel"], weights["dense/bias"])
        self.last = (weights["dense_1/kernel"][:, 0], weights["dense_1/bias"][0])

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """[N] float32. A text of which it knows no word gets what an empty one does."""
        tokens = torch.zeros(len(texts), LENGTH, dtype=torch.long)
        for row, text in zip(tokens, texts, strict=True):
            text = self.stop_words.sub("", NO_TEXT.sub(" ", text.lower())).translate(NO_WORD)
            known = [self.index[word] for word in text.split() if word in self.index][-LENGTH:]
            row[LENGTH - len(known) :] = torch.tensor(known, dtype=torch.long)
        logits = []
        for rows in tokens.split(512):
            states = self.lstm(self.embedding[rows])[0].amax(1)
            logits.append(torch.relu(states @ self.hidden[0] + self.hidden[1]) @ self.last[0] + self.last[1])
        return torch.cat(logits).numpy()


class _Container:
    """What a class of the pickle becomes: its attributes and nothing else."""

    def __init__(self, *_: Any) -> None: ...


class _Containers(pickle.Unpickler):
    """Makes no object but containers: the pickle cannot run anything."""

    def find_class(self, module: str, name: str) -> Any:
        kept = {"OrderedDict": OrderedDict, "defaultdict": defaultdict, "int": int}
        return kept.get(name, _Container)


def _word_index(file: IO[bytes]) -> Mapping[str, int]:
    """Of the first object in the pickled pipeline that has one."""
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


def _weights(file: IO[bytes]) -> dict[str, Tensor]:
    """Its layers; those of the LSTM by PyTorch's names. Both order the gates input, forget, cell, output."""
    with h5py.File(file) as stored:
        layers = stored["model_weights"]

        def read(name: str) -> Tensor:
            return torch.from_numpy(np.array(layers[f"{name}:0"]))

        found = {"embedding": read("embedding/embedding/embeddings")}
        for direction, suffix in (("forward", ""), ("backward", "_reverse")):
            part = f"bidirectional/bidirectional/{direction}_lstm"
            found[f"weight_ih_l0{suffix}"] = read(f"{part}/kernel").T
            found[f"weight_hh_l0{suffix}"] = read(f"{part}/recurrent_kernel").T
            found[f"bias_ih_l0{suffix}"] = read(f"{part}/bias")
            found[f"bias_hh_l0{suffix}"] = torch.zeros(4 * UNITS)
        for layer in ("dense", "dense_1"):
            found |= {f"{layer}/{kind}": read(f"{layer}/{layer}/{kind}") for kind in ("kernel", "bias")}
    return found


def _stop_words(source: str) -> re.Pattern[str]:
    """The expression of its settings whose matches it removes."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "RE_STOPWORD_STRING":
            return re.compile(ast.literal_eval(node.value), re.IGNORECASE)
    raise ValueError("tox-block's settings hold no stop words")
