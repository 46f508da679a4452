import numpy as np
import pytest

from align.eval.answer_features import (
    JudgedAnswer,
    SentenceEncoder,
    answer_features,
    parse,
    word_features,
    word_similarities,
)
from align.eval.questions import Question

QUESTION = Question("1", "here", "all", "May I swim?", "Yes, you may.", ("Yes, you may.", "Yes."), ("No, never.",))


def numbers(texts):
    """Different unit vectors for different texts."""
    angles = [sum(text.encode()) for text in texts]
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_similarities_of_two_texts_by_hand():
    """Words "it is not cold" and "ice is cold": 2 of 4 and 3 are shared; "is" is in the question, so new are 3 and 2."""
    answer, other = parse("It is NOT cold."), parse("Ice is cold")
    words, new, precision, recall, characters, signed = word_similarities(answer, other, frozenset({"is"}))
    assert words == pytest.approx(2 * 2 / 7)
    assert new == pytest.approx(2 * 1 / 5)
    assert (precision, recall) == pytest.approx((1 / 3, 1 / 2))
    assert signed == -words, "only one of the texts has a negation"
    # " it is not cold " has 13 sequences of 4 characters, " ice is cold " 10; shared: " is ", " col", "cold", "old ".
    assert characters == pytest.approx(2 * 4 / 23)
    assert word_similarities(parse(""), parse(""), frozenset()) == [0, 0, 0, 0, 0, 0]


def test_a_contraction_is_a_negation():
    assert parse("It doesn't.").negated
    assert not parse("It does, nobly.").negated


def test_agreement_changes_sides_with_the_references():
    """Swapping correct and incorrect references swaps their features and the sign of the differences."""
    swapped = Question("1", "here", "all", QUESTION.text, "No, never.", QUESTION.incorrect, QUESTION.correct)
    first, second = (
        answer_features([JudgedAnswer(QUESTION.text, "Yes, of course.", known)], numbers).agreement[0]
        for known in (QUESTION, swapped)
    )
    highest_correct, highest_incorrect, difference = first[:8], first[8:16], first[16:24]
    assert second[:8] == pytest.approx(highest_incorrect)
    assert second[8:16] == pytest.approx(highest_correct)
    assert second[16:24] == pytest.approx(-difference)
    assert highest_correct[0] == pytest.approx(0.5)  # "yes of course" and "yes": 2 * 1 / 4
    assert highest_incorrect[0] == 0


def test_features_do_not_depend_on_the_other_answers():
    items = [JudgedAnswer("May I swim?", answer, known) for answer in ("Yes.", "no", "") for known in (QUESTION, None)]
    together = answer_features(items, numbers)
    for row, item in enumerate(items):
        alone = answer_features([item], numbers)
        assert together.agreement[row] == pytest.approx(alone.agreement[0])
        assert together.text[row].toarray() == pytest.approx(alone.text[0].toarray())


def test_words_of_an_answer_count_whatever_stands_beside_it():
    """Of "< no ! >", each of 4 words and 3 pairs weighs 1 / sqrt(7)."""
    texts = ["No!", "Yes", ""]
    together = word_features(texts)
    assert sorted(together[0].data) == pytest.approx([7**-0.5] * 7)
    assert [word_features([text]).toarray().tolist() for text in texts] == [[row] for row in together.toarray().tolist()]


def test_a_sentence_vector_has_length_1_and_ignores_padding():
    encode = SentenceEncoder("tiny-llama")
    texts = ["A short text.", "A text that is quite a bit longer than the other one.", ""]
    together = encode(texts)
    assert np.linalg.norm(together, axis=1) == pytest.approx([1, 1, 1], abs=1e-3)
    assert together[0] == pytest.approx(encode(texts[:1])[0], abs=0.02)  # bfloat16
    assert abs(together[0] @ together[1]) < 0.999
