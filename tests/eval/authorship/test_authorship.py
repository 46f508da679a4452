"""Authorship: the figures by hand, what guessing gives, and the whole way from the form in the app to the figures."""

import json
import math

import numpy as np
import pytest

from align.errors import UserError
from align.eval.authorship.task import AuthorshipConfig, authorship_figures, read_answers, run_authorship
from align.eval.core.results import read_evaluations
from annotation_ui import rule_sets
from annotation_ui.database import Database
from annotation_ui.export import Selection, rows_to_export
from annotation_ui.importing import NewBatch, import_rows
from annotation_ui.judgments import Judgments
from annotation_ui.leases import Leases
from annotation_ui.tasks import TASKS
from tests.annotation_ui.running import add_users, do

PERSON, MODEL, UNSURE = "follows", "violates", "unsure"


def said(*by_prompt):
    """[3, P] from (a person, a model, don't know) of each prompt."""
    return np.array(by_prompt, dtype=float).T


def values(figures):
    return {each.name: each.value for each in figures}


PEOPLE = said((3, 1, 0), (2, 0, 2))  # 6 answers decide, 5 of them are right
GOOD = said((2, 2, 0), (1, 1, 2))  # 6 decide, 3 say a model
CONTROL = said((0, 4, 0), (1, 3, 0))  # 8 decide, 7 say a model


def test_figures_by_hand():
    figures = authorship_figures(GOOD, PEOPLE, CONTROL, 500)
    assert values(figures) == pytest.approx(
        {
            "judged rightly": (3 / 6 + 5 / 6) / 2,
            "called a model": 3 / 6,
            "people called people": 5 / 6,
            "don't know": 2 / 8,
            "judged rightly, minus control": (3 / 6 + 5 / 6) / 2 - (7 / 8 + 5 / 6) / 2,
        }
    )
    assert [each.n for each in figures] == [12, 6, 6, 8, 14]
    control = authorship_figures(CONTROL, PEOPLE, None, 500)
    assert len(control) == 4
    assert values(control)["judged rightly"] == pytest.approx((7 / 8 + 5 / 6) / 2)


def test_whoever_guesses_or_always_says_the_same_is_right_in_half_of_the_cases():
    """However many texts there are of either."""
    always = authorship_figures(said((0, 5, 0), (0, 1, 0)), said((0, 30, 0), (0, 4, 1)), None, 500)
    guesses = authorship_figures(said((2, 2, 0), (3, 3, 0)), said((9, 9, 9), (1, 1, 0)), None, 500)
    assert values(always)["judged rightly"] == values(guesses)["judged rightly"] == 0.5


def test_intervals_are_at_least_as_wide_as_drawing_prompts_with_all_that_was_said_of_their_texts():
    """Two prompts: drawn are the first twice, the second twice, or both; the ends are those of the two extremes."""
    figures = {each.name: each for each in authorship_figures(GOOD, PEOPLE, CONTROL, 2000)}
    rightly = figures["judged rightly"]
    first, second = (2 / 4 + 3 / 4) / 2, (1 / 2 + 2 / 2) / 2
    assert rightly.low <= first
    assert rightly.high >= second
    difference = figures["judged rightly, minus control"]
    assert difference.low <= (2 / 4 - 4 / 4) / 2
    assert difference.high >= (1 / 2 - 3 / 4) / 2
    repeated = [np.tile(each, (1, 8)) for each in (GOOD, PEOPLE)]
    more = authorship_figures(*repeated, None, 2000)[0]
    assert more.value == rightly.value
    assert more.high - more.low < rightly.high - rightly.low
    one = authorship_figures(GOOD[:, :1], PEOPLE[:, :1], None, 500)
    assert all(each.high - each.low > 0.5 for each in one)
    # Ten prompts, each with one answer that is right: Newcombe with 0.025 ** 0.1 = 0.6915 as both lower ends.
    sure = authorship_figures(said(*[(0, 1, 0)] * 10), said(*[(1, 0, 0)] * 10), None, 500)[0]
    assert (sure.value, sure.low, sure.high) == pytest.approx((1.0, 1 - math.hypot(0.3085, 0.3085) / 2, 1.0), abs=1e-4)


def test_where_nobody_decides_there_is_no_number():
    figures = authorship_figures(said((0, 0, 4), (0, 0, 1)), PEOPLE, None, 500)
    assert values(figures) == {
        "judged rightly": None,
        "called a model": None,
        "people called people": pytest.approx(5 / 6),
        "don't know": 1.0,
    }


def row(text, author, verdict, prompt="p", rule="written-by-person"):
    named = {} if author is None else {"model": author}
    return {"prompt": prompt, "response": text, "rule": rule, "verdict": verdict, **named}


def write(path, rows):
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return [str(path)]


def test_answers_are_counted_by_author_and_prompt(tmp_path):
    rows = [row("a", "person", PERSON), row("a", "person", UNSURE), row("b", "m", MODEL), row("c", "m", PERSON, "q"),
            row("d", "m", MODEL, "q"), row("b", "m", MODEL, rule="no-threats")]  # fmt: skip
    found = read_answers(write(tmp_path / "j.jsonl", rows))
    assert {author: each.texts for author, each in found.items()} == {"person": 1, "m": 3}
    assert found["person"].counts.tolist() == [[1, 0], [0, 0], [1, 0]]
    assert found["m"].counts.tolist() == [[0, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("rows", "settings", "says"),
    [
        ([row("a", None, MODEL)], {}, r"field 'model' is missing for 'a': import the texts with their author under model"),
        ([row("a", "m", MODEL)], {}, r"no text by person; the authors are m$"),
        ([row("a", "person", MODEL)], {}, r"no text by a model; the authors are person$"),
        ([row("a", "m", MODEL), row("b", "person", MODEL)], {"control": "x"}, r"by the control 'x'; the models are m$"),
        ([row("a", "m", MODEL, rule="x")], {}, r"no answer to rule written-by-person; label with"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(tmp_path, rows, settings, says):
    config = AuthorshipConfig(judgments=write(tmp_path / "j.jsonl", rows), output=str(tmp_path), **settings)
    with pytest.raises(UserError, match=says):
        run_authorship(config)


def test_from_the_form_in_the_app_to_the_figures(tmp_path):
    """Two labelers judge a text each of a person, a model and the control; none sees who wrote it."""
    database = Database(f"sqlite:///{tmp_path}/app.db")
    database.upgrade()
    judgments = Judgments(Leases(database))
    with database.write() as session:
        rule_sets.store_shipped(session)
    authors = ["person", "big", "tiny"]
    texts = {"prompt": "On ponds", "responses": [f"By {name}." for name in authors], "model": authors}
    import_rows(database, NewBatch("b", "rules", overlap=2, rule_set="authorship"), [("f:1", texts)])
    form = rule_sets.read(rule_sets.SHIPPED / "authorship.yaml")["rules"]
    view = TASKS["rules"].view(
        {"prompt": "p", "response": "r", "rules": ["written-by-person"], "model": "big"}, [], {}, form
    )
    assert "big" not in json.dumps(view)
    assert [name for _, name in view["rules"][0]["answers"]] == ["A model", "I don't know", "A person"]
    ann, bob = add_users(database, "ann", "bob")
    for user, given in ((ann, (PERSON, PERSON, MODEL)), (bob, (PERSON, UNSURE, MODEL))):
        for verdict in given:
            do(judgments, user, "rules", {"verdicts": {"written-by-person": {"verdict": verdict, "note": ""}}})
    path = write(tmp_path / "j.jsonl", rows_to_export(database, Selection("rule_judgments")))
    run_authorship(AuthorshipConfig(judgments=path, control="tiny", output=str(tmp_path / "out"), table=False))
    big, tiny = read_evaluations(tmp_path / "out" / "authorship.json")
    assert (big.model, tiny.model) == ("big", "tiny")
    assert values(big.figures) == {
        "judged rightly": 0.5,
        "called a model": 0.0,
        "people called people": 1.0,
        "don't know": 0.5,
        "judged rightly, minus control": -0.5,
    }
    assert values(tiny.figures)["judged rightly"] == 1.0
    (table,) = big.tables.values()
    assert table[1] == {"author": "big", "texts": 1, "a person": 1, "a model": 0, "don't know": 1}
    database.close()
