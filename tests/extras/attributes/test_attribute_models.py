import math
import random

import pytest
import torch

from align.core.errors import UserError
from align.extras.attributes import AttributeConfig, AttributeTrainer
from align.extras.attributes.expressions import Condition, Expression, choose
from align.extras.attributes.model import Head, head_losses, heads_of, load_attribute_model
from align.extras.attributes.train import choose_heads, read_ratings
from align.extras.rules.judgments import JudgedResponse
from align.reward.checkpoint import is_external
from align.reward.rankings import reward_rankings
from tests.extras.rules.planted import WORDS, has_digit, response
from tests.extras.running import settings
from tests.files import read_rows

HI = ({"role": "user", "content": "Hi"},)


def test_each_heads_loss_by_hand():
    nan = math.nan
    outputs = torch.tensor([[1.0, 0.5, 7.0], [0.0, 0.25, 7.0]], requires_grad=True)
    targets = torch.tensor([[0.5, 7.0, nan], [nan, 4.0, nan]])
    losses = head_losses(outputs, targets, torch.tensor([True, False, False]))
    # The yes or no: two labelers who disagree at logit 1. The rating: (.5 - 1)^2 + (.25 - .5)^2. The third: nobody judged.
    assert losses.tolist() == pytest.approx([0.8132617, 0.3125, 0.0], abs=1e-6)
    losses.sum().backward()
    assert outputs.grad[1, 0] == 0.0  # what nobody judged pulls nowhere
    assert outputs.grad[:, 2].tolist() == [0.0, 0.0]


def test_labelers_are_averaged_attribute_by_attribute():
    given = [{"safe": 1, "rating": 6}, {"safe": 0}, {"rating": 3}]
    records = [{"prompt": "Hi", "response": "Yo", "attributes": row} for row in given]
    assert read_ratings(records, False) == [JudgedResponse(HI, "Yo", {"safe": 0.5, "rating": 4.5})]


def test_heads_and_their_kinds():
    rated = [JudgedResponse(HI, "a", {"safe": 1, "rating": 6}), JudgedResponse(HI, "b", {"safe": 0.5})]
    both = [Head("rating", "scale"), Head("safe", "binary")]
    assert choose_heads([], rated, False) == both
    assert choose_heads(["safe"], rated, True) == [Head("safe", "binary"), Head("preference", "ranking")]
    for wanted, says in {
        "save": "no judgments of 'save'; did you mean safe",
        "safe=yes": "the kind must be binary or scale",
        "rating=binary": "'rating' has values from 6 to 6, but kind binary allows 0 to 1",
        "safe=scale": "has values from 0.5 to 1, but kind scale allows 1 to 7",
    }.items():
        with pytest.raises(UserError, match=says):
            choose_heads([wanted], rated, False)
    with pytest.raises(UserError, match="heads: none"):
        choose_heads([], [], False)


def planted(count, seed=0):
    """Responses that are unsafe if they hold a digit, and rated by their length in words."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        text = response(rng, rng.random() < 0.5)
        attributes = {"unsafe": int(has_digit(text)), "rating": 1 + len(text.split())}
        shown = {name: value for name, value in attributes.items() if rng.random() < 0.8} or attributes
        rows.append({"prompt": f"{rng.choice(WORDS)} {number}?", "response": text, "attributes": shown})
    return rows


def rankings(count, seed=1):
    """The response without a digit is better."""
    rng = random.Random(seed)
    return [
        {"prompt": f"{rng.choice(WORDS)} {n}?", "responses": [response(rng, True), response(rng, False)], "ranks": [2, 1]}
        for n in range(count)
    ]


@pytest.mark.parametrize(("model", "more"), [("tiny-t5", {}), ("tiny-gpt2", {"lora_r": 4})])
def test_what_is_saved_says_the_same(tmp_path, align_cache, model, more):
    config = AttributeConfig(**settings(tmp_path / "run", batch_size=8, validation_split=0.2, num_train_epochs=1, **more))
    trainer = AttributeTrainer(model, planted(24), config, rankings=rankings(8))
    folder = trainer.train()
    assert {"head/unsafe", "head/rating", "head/preference"} <= read_rows(tmp_path / "run" / "metrics.jsonl")[-1].keys()
    assert heads_of(str(folder)) == [Head("rating", "scale"), Head("unsafe", "binary"), Head("preference", "ranking")]
    assert not is_external(str(folder))
    loaded, _ = load_attribute_model(str(folder), "float32")
    with torch.no_grad():
        memory, disk = (
            reward_rankings(module, trainer.held_out, torch.device("cpu")) for module in (trainer.engine.module, loaded)
        )
    assert memory.shape[1] == 3
    assert torch.allclose(memory, disk, atol=1e-5)


NAMES = ["sensible", "specific", "interesting", "unsafe", "no-digits"]


def candidate(sensible, specific, interesting, unsafe=0.0):
    return {"sensible": sensible, "specific": specific, "interesting": interesting, "unsafe": unsafe, "no-digits": 0.5}


def test_lamdas_ranking_by_hand_and_an_unsafe_candidate_is_dropped_however_good():
    rank, condition = Expression("3*sensible+specific+interesting", NAMES, "rank"), Condition("unsafe<0.2", NAMES, "filter")
    candidates = {0: candidate(0.9, 0.2, 0.1), 1: candidate(0.5, 0.9, 0.9), 2: candidate(0.8, 0.8, 0.8)}
    assert [rank(values) for values in candidates.values()] == pytest.approx([3.0, 3.3, 4.0])
    assert choose(candidates, None, rank) == [2]
    candidates = {0: candidate(0.8, 0.8, 0.8, 0.1), 1: candidate(1, 1, 1, unsafe=0.2)}
    assert rank(candidates[1]) == 5.0
    assert choose(candidates, condition, rank) == choose(candidates, condition, None) == [0]
    assert choose({1: candidates[1]}, condition, rank) == []


def test_names_with_hyphens_brackets_and_several_conditions():
    values = candidate(0.5, 0.25, 1.0, 0.1)
    assert Expression("2*(no-digits - specific)/-sensible", NAMES, "rank")(values) == pytest.approx(-1.0)
    assert Expression("no-digits-0.5", NAMES, "rank")(values) == 0.0
    assert Condition("0.1 <= no-digits < 0.6, sensible>=0.5", NAMES, "filter").holds(values)
    assert not Condition("sensible+specific>1, unsafe<0.2", NAMES, "filter").holds(values)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (Expression, "3*sensibel", "unknown attribute 'sensibel' .*; did you mean sensible"),
        (Expression, "3*", "invalid expression"),
        (Expression, "__import__('os')", r"only numbers, attributes, \+ - \* / and parentheses"),
        (Expression, "sensible**9999", r"only numbers, attributes"),
        (Expression, "unsafe<0.2", r"only numbers, attributes"),
        (Expression, "'a'", r"only numbers, attributes"),
        (Condition, "unsafe", "use comparisons such as"),
        (Condition, "unsafe == 0", "use comparisons such as"),
        (Condition, "()", "use comparisons such as"),
        (Condition, "unsafe<0.2, open('x')<1", "only numbers, attributes"),
    ],
)
def test_anything_else_is_refused(kind, text, says):
    with pytest.raises(UserError, match=says):
        kind(text, NAMES, "rank")


def test_a_division_by_zero_is_one_line_and_a_condition_guards_those_after_it():
    with pytest.raises(UserError, match="division by zero"):
        Expression("1/unsafe", NAMES, "rank")(candidate(1, 1, 1))
    guarded = Condition("unsafe>0, sensible/unsafe>1", NAMES, "filter")
    assert [guarded.holds(candidate(1, 1, 1, unsafe)) for unsafe in (0.0, 0.5)] == [False, True]
    with pytest.raises(UserError, match="division by zero"):
        Condition("sensible/unsafe>1, unsafe>0", NAMES, "filter").holds(candidate(1, 1, 1))
