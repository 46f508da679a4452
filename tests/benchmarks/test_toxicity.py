import io
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from align.core.statistics import roc_auc
from align.eval.toxicity_scorers import sense_logits
from benchmarks.toxicity import WORD_SHARE, InertUnpickler, Teacher, combine, fit_sense, fit_words, is_held_out, plain_tweet


def test_words_are_fitted_to_the_minimum():
    """One feature of +-1 with 3 of 4 right at each side: without a penalty the logit is log 3; the penalty shrinks it.

    At the minimum the gradient is 0: 0.75 - sigmoid(w) = penalty * w, for weights that sum to 1.
    """
    inputs = csr_matrix(np.array([[1.0]] * 4 + [[-1.0]] * 4))
    targets, even = np.array([1, 1, 1, 0, 0, 0, 0, 1.0]), np.ones(8)
    weight, bias = fit_words(inputs, targets, even, penalty=1e-9)
    assert float(weight[0]) == pytest.approx(math.log(3), abs=1e-3)
    assert bias == pytest.approx(0, abs=1e-3)
    weight, _ = fit_words(inputs, targets, even, penalty=0.25)
    assert float(weight[0]) == pytest.approx(4 * (0.75 - 1 / (1 + math.exp(-float(weight[0])))), abs=1e-3)
    soft, _ = fit_words(csr_matrix(np.array([[1.0], [-1.0]])), np.array([0.75, 0.25]), np.ones(2), penalty=1e-9)
    assert float(soft[0]) == pytest.approx(math.log(3), abs=1e-3)  # a target of 0.75 is three of four
    doubled, _ = fit_words(inputs, targets, np.array([1, 1, 1, 3, 1, 1, 1, 3.0]), penalty=1e-9)
    assert float(doubled[0]) == pytest.approx(0, abs=1e-3)  # the wrong ones weigh as much as the right ones


def planted() -> tuple[torch.Tensor, csr_matrix, np.ndarray, np.ndarray]:
    """1,000 texts whose toxicity one state decides, 1,000 of which one n-gram does, and 500 wrong ones of weight 0."""
    generator = np.random.default_rng(0)
    states = torch.from_numpy(generator.normal(3, 2, (2500, 8))).float()  # neither centered nor scaled
    words = np.zeros((2500, 4))
    words[:, 0] = 1
    words[1000:2000, 1] = generator.random(1000) < 0.5
    toxic = np.concatenate([states[:1000, 2] > 3, words[1000:2000, 1] > 0, states[2000:, 2] < 3]).astype(float)
    states[1000:2000, 2] = 3
    return states, csr_matrix(words), toxic, np.array([1.0] * 2000 + [0.0] * 500)


def test_the_head_finds_what_is_in_the_states_and_what_is_in_the_words():
    states, words, toxic, weights = planted()
    of_words, _ = fit_words(words, toxic, weights)
    head = combine(fit_sense(states, toxic, weights), of_words, states, words, toxic, weights)
    logits = sense_logits(states, head).numpy() + words @ head["words"].numpy()
    assert roc_auc(logits[:1000], toxic[:1000]) > 0.95
    assert roc_auc(logits[1000:2000], toxic[1000:2000]) > 0.95
    again = fit_sense(states, toxic, weights)
    assert all(torch.equal(tensor, again[name]) for name, tensor in fit_sense(states, toxic, weights).items())


def test_both_parts_are_scaled_and_shifted_together():
    """At the minimum of the cross-entropy the error and the error times the logit are 0 on average, however large the
    parts were; the words keep their share of the sum."""
    states, words, toxic, weights = planted()
    sense, (of_words, _) = fit_sense(states, toxic, weights), fit_words(words, toxic, weights)
    steep = sense | {"sense": 5 * sense["sense"], "bias": 5 * sense["bias"] + 7}
    targets = 0.2 + 0.5 * toxic
    for part, factor in ((sense, 1), (steep, 5)):
        head = combine(part, factor * of_words, states, words, targets, weights)
        logits = sense_logits(states, head).numpy() + words @ head["words"].numpy()
        error = (1 / (1 + np.exp(-logits)) - targets)[:2000]
        assert abs(error.mean()) < 1e-3
        assert abs((error * logits[:2000]).mean()) < 1e-2
        scale = float(head["words"][1] / (WORD_SHARE * factor * of_words[1]))
        assert torch.allclose(head["sense"], scale * (1 - WORD_SHARE) * part["sense"], rtol=1e-4)


def test_a_fifth_is_held_out_by_the_text_alone():
    texts = [f"text {number}" for number in range(1000)]
    held = is_held_out(texts)
    assert 150 < held.sum() < 250
    assert is_held_out(texts[::-1]).tolist() == held[::-1].tolist()


def test_a_tweet_without_what_only_tweets_have():
    assert plain_tweet('"RT @some_one: look &amp;amp; see http://t.co/x1 #great &#128514;!!') == "look & see great 😂"


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_runs_nothing(tmp_path):
    """The same bytes make a file where pickle itself reads them."""
    stored = pickle.dumps(Touches(tmp_path / "made"))
    InertUnpickler(io.BytesIO(stored)).load()
    assert not (tmp_path / "made").exists()
    pickle.loads(stored)
    assert (tmp_path / "made").exists()


def test_the_teacher_knows_rude_words_and_reads_each_text_alone_and_its_end():
    """The real one, a wheel of 18 MB from the package index."""
    teacher = Teacher()
    texts = ["You are a stupid idiot.", "The train leaves at nine.", "xqzzv", ""]
    together = teacher(texts)
    assert together[0] > 2 > -3 > together[1]
    assert together[2] == together[3]  # no word that it knows, and no word
    assert np.array([teacher([text])[0] for text in texts]) == pytest.approx(together, abs=1e-5)
    long = teacher(["idiot " + "train " * teacher.LENGTH, "train " * teacher.LENGTH])
    assert long[0] == pytest.approx(long[1], abs=1e-5)
    assert teacher.words[:3] == ["the", "to", "of"]
