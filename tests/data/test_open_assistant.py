import re

import pytest

from align.data.formats import convert_row
from align.data.records import Demonstration, Prompt, Ranking
from tests.data.rows import assistant, user
from tests.refusals import refusal


def node(text, *replies, role=None, rank=None, **fields):
    """A message with the fields of the published trees; texts that begin with q are the prompter's."""
    role = role or ("prompter" if text.startswith("q") else "assistant")
    known = {"message_id": f"id-{text}", "user_id": "u", "text": text, "role": role, "lang": "en", "rank": rank}
    reviewed = {"review_count": 3, "review_result": True, "deleted": False, "synthetic": False, "model_name": None}
    marks = {"emojis": {"+1": 2}, "labels": {"spam": {"value": 0.0, "count": 3}}}
    return {**known, **reviewed, **marks, "replies": list(replies), **fields}


def tree(root):
    return {"message_tree_id": "t", "tree_state": "ready_for_export", "prompt": root, "origin": None}


#  q ── worse (rank 1) ── q-lost ── late
#    ├─ best (rank 0) ─┬─ q2 (rank 1) ── two
#    │                 └─ q1 (rank 0) ── one
#    └─ spam (rank 2, deleted)
TREE = tree(
    node(
        "q",
        node("worse", node("q-lost", node("late")), rank=1),
        node("best", node("q2", node("two"), rank=1), node("q1", node("one"), rank=0), rank=0),
        node("spam", rank=2, deleted=True),
    )
)


def test_best_answers_are_learnt_once_each_and_ranked_siblings_give_a_ranking_each():
    layout, records = convert_row(TREE, Demonstration)
    assert layout.name == "OpenAssistant tree"
    assert records == [
        Demonstration(prompt=(user("q"),), continuation=(assistant("best"), user("q1"), assistant("one")), id="id-one"),
        Demonstration(prompt=(user("q"), assistant("best"), user("q2")), continuation=(assistant("two"),), id="id-two"),
    ]
    expected = Ranking(prompt=(user("q"),), responses=("best", "worse"), ranks=(1, 2), id="id-q")
    assert convert_row(TREE, Ranking)[1] == [expected]


def test_siblings_deep_in_the_tree_are_ranked_after_all_turns_before_them():
    inner = node("q2", node("b", rank=1), node("a", rank=0), node("unranked"))
    assert convert_row(tree(node("q", node("only", inner))), Ranking)[1] == [
        Ranking(prompt=(user("q"), assistant("only"), user("q2")), responses=("a", "b"), ranks=(1, 2), id="id-q2")
    ]


def test_every_prompter_turn_is_a_prompt():
    prompts = convert_row(TREE, Prompt)[1]
    assert [prompt.id for prompt in prompts] == ["id-q", "id-q-lost", "id-q2", "id-q1"]
    assert prompts[1] == Prompt(prompt=(user("q"), assistant("worse"), user("q-lost")), id="id-q-lost")


def test_no_best_is_guessed_among_unranked_siblings_and_a_reply_that_nobody_answered_is_not_kept():
    for kind in (Ranking, Demonstration):
        assert convert_row(tree(node("q", node("a"), node("b"))), kind)[1] == []
    assert convert_row(tree(node("q", node("a", node("q2")))), Demonstration)[1] == [
        Demonstration(prompt=(user("q"),), continuation=(assistant("a"),), id="id-a")
    ]


def test_nine_of_many_siblings_are_kept():
    siblings = [node(f"a{i}", rank=i) for i in range(17)]
    (record,) = convert_row(tree(node("q", *siblings)), Ranking)[1]
    assert record.responses == tuple(f"a{i}" for i in range(0, 17, 2))
    assert record.ranks == tuple(range(1, 10))


@pytest.mark.parametrize("fields", [{"deleted": True}, {"review_result": False}])
@pytest.mark.parametrize("kind", [Demonstration, Ranking, Prompt])
def test_a_refused_root_gives_nothing(kind, fields):
    assert convert_row(tree(node("q", node("a", rank=0), node("b", rank=1), **fields)), kind)[1] == []


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (node("q", node("a", rank=-1), node("b")), "field 'rank': is -1; use a whole number, 0 for the best, or null"),
        (node("q", node(" ")), "field 'text': is empty; add the text or remove the row"),
        (node("q", role="bot"), "field 'role': is 'bot'; use prompter or assistant"),
        (node("q", node("q2")), "field 'replies': has .* where a message of the assistant belongs; correct the tree"),
    ],
)
def test_a_damaged_tree_is_an_error(root, message):
    assert re.fullmatch(message, refusal(convert_row, tree(root), Demonstration))
