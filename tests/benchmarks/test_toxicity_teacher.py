"""What the default scorer's n-grams imitate: a model of another package, read without running anything of it."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest

from benchmarks.toxicity_data import LENGTH, Teacher, _Containers


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_runs_nothing(tmp_path):
    """The same bytes make a file where pickle itself reads them."""
    stored = pickle.dumps(Touches(tmp_path / "made"))
    _Containers(io.BytesIO(stored)).load()
    assert not (tmp_path / "made").exists()
    pickle.loads(stored)
    assert (tmp_path / "made").exists()


@pytest.fixture(scope="module")
def teacher():
    """The real one, a wheel of 18 MB from the package index."""
    return Teacher()


def test_the_teacher_knows_rude_words(teacher):
    insult, plain = teacher(["You are a stupid idiot.", "The train leaves at nine."])
    assert insult > 2 > -3 > plain
    assert teacher.words[:3] == ["the", "to", "of"]


def test_the_teacher_reads_each_text_alone_and_its_end(teacher):
    texts = ["You are a stupid idiot.", "The train leaves at nine.", "xqzzv", ""]
    together = teacher(texts)
    assert np.array([teacher([text])[0] for text in texts]) == pytest.approx(together, abs=1e-5)
    assert together[2] == together[3]  # no word that it knows, and no word
    long = teacher(["idiot " + "train " * LENGTH, "train " * LENGTH])
    assert long[0] == pytest.approx(long[1], abs=1e-5)
