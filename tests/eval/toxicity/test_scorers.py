"""Scorers: one function for all kinds, a classifier, and scores on disk."""

import pytest
import torch
from accelerate import Accelerator

from align.core.errors import UserError
from align.eval.toxicity.scorers import ScorerConfig, ToxicityScorer, open_scorer
from align.eval.toxicity.task import score_texts


def lengths(texts):
    """A scorer of characters: 0.1 for each."""
    return [len(text) / 10 for text in texts]


# ------------------------------------------------------------------------------------------------ what a scorer gives


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([float("nan"), 0.5], "gave nan for 'a', not a number from 0 to 1"),
        ([0.5, None], "gave None for 'bb'"),
        ([0.5, 1.5], r"gave 1\.5 for 'bb'"),
        ([-0.1, 0.5], "gave -0.1"),
        ([0.5], "gave 1 scores for 2 texts"),
        ([0.5] * 3, "gave 3 scores for 2 texts"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    ],
)
def test_a_failed_score_is_an_error_never_0(given, complaint):
    def function(texts):
        if isinstance(given, Exception):
            raise given
        return given

    with pytest.raises(UserError, match=f"scorer s.* {complaint}.*; completed results are saved") as caught:
        ToxicityScorer("s", "1", function)(["a", "bb"])
    assert "\n" not in str(caught.value)


def test_a_function_is_called_in_batches():
    sizes = []

    def count(texts):
        sizes.append(len(texts))
        return lengths(texts)

    globals()["count"] = count
    scorer = open_scorer(ScorerConfig(scorer=f"{__name__}:count", scorer_batch=2))
    assert scorer(["a", "bb", "ccc", "dd", "e"]) == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.1])
    assert sizes == [2, 2, 1]
    assert len(scorer.version) == 12


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("perspectiv", "scorer 'perspectiv' is unknown; give minilm-l6, model:NAME"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("math:no_such", "no_such"),
        ("model:/no/such/folder", "no folder, no hub name"),
        ("model:tiny-llama", "is not a text classifier: it has no weight 'score.weight'"),
    ],
)
def test_a_scorer_that_cannot_be_had(name, complaint):
    with pytest.raises(UserError, match=complaint):
        open_scorer(ScorerConfig(scorer=name))


# ------------------------------------------------------------------------------------------------------- a classifier


@pytest.fixture(scope="module")
def classifier(sharp_folders, tmp_path_factory):
    """A tiny classifier of three labels: softmax, and the same weights with `multi_label_classification`: sigmoid."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("classifier")
    source = sharp_folders["tiny-gpt2"]
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=3)
    model.config.id2label = {0: "fine", 1: "Toxic", 2: "threat"}
    model.config.label2id = {name: index for index, name in model.config.id2label.items()}
    model.config.pad_token_id = AutoTokenizer.from_pretrained(source).pad_token_id
    torch.nn.init.normal_(model.score.weight, std=0.5)
    for problem, name in (("single_label_classification", "softmax"), ("multi_label_classification", "sigmoid")):
        model.config.problem_type = problem
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder / name)
    return folder, model.eval()


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_classifier_gives_its_labels_probability(classifier, kind):
    from transformers import AutoTokenizer

    folder, model = classifier
    tokenizer = AutoTokenizer.from_pretrained(folder / kind)
    texts = ["hello", "you", "a much longer text than the others", "b"]
    scorer = open_scorer(ScorerConfig(scorer=f"model:{folder / kind}", scorer_batch=3))
    expected = []
    for text in texts:  # one at a time: no padding
        with torch.no_grad():
            logits = model(**tokenizer([text], return_tensors="pt")).logits[0]
        expected.append(float(logits.softmax(-1)[1] if kind == "softmax" else logits[1].sigmoid()))
    assert scorer(texts) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.01
    assert scorer.title.startswith(f"model:{folder / kind} 'toxic' (")


def test_a_label_that_is_not_there(classifier):
    folder, _ = classifier
    with pytest.raises(UserError, match="has no label 'rude'; set scorer_label to one of fine, toxic, threat"):
        open_scorer(ScorerConfig(scorer=f"model:{folder / 'softmax'}", scorer_label="rude"))


# ------------------------------------------------------------------------------------------------------------ scores on disk


def test_each_text_is_scored_once_whoever_wrote_it(tmp_path):
    asked = []
    scorer = ToxicityScorer("s", "1", lambda texts: asked.extend(texts) or lengths(texts))
    accelerator = Accelerator(cpu=True)
    assert score_texts(["bb", "a", "bb", "", "  "], scorer, tmp_path, 2, accelerator) == pytest.approx([0.2, 0.1, 0.2, 0, 0])
    assert sorted(asked) == ["a", "bb"]
    assert score_texts(["a", "ccc"], scorer, tmp_path, 2, accelerator) == pytest.approx([0.1, 0.3])
    assert asked[2:] == ["ccc"]
    other = ToxicityScorer(
        "s", "2", lambda texts: [0.9] * len(texts)
    )  # another version: nothing of the first is taken for its own
    assert score_texts(["a"], other, tmp_path, 2, accelerator) == [0.9]
