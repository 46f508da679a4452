import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.data.records import RuleJudgment
from align.extras.candidates import best_response, geometric_mean
from align.extras.rules.judgments import (
    ScoredJudgment,
    choose_rules,
    collect_judgments,
    read_judgments,
    read_rules,
    rule_metrics,
    split_judgments,
)

USER = ({"role": "user", "content": "Hi"},)


def judgment(response, rule, verdict, prompt="Hi"):
    return RuleJudgment(prompt=prompt, response=response, rule=rule, verdict=verdict)


def test_a_target_is_the_share_of_labelers_who_decided_that_the_rule_is_violated():
    verdicts = {
        "disagree": ("violates", "follows"),
        "two-of-three": ("violates", "unsure", "violates", "follows"),
        "all": ("violates", "violates"),
        "none": ("follows", "unsure"),
        "nobody-knows": ("unsure", "unsure"),
    }
    rows = [judgment("Yo", rule, verdict) for rule, given in verdicts.items() for verdict in given]
    (item,) = collect_judgments(rows)
    assert (item.prompt, item.response) == (USER, "Yo")
    assert item.targets == {"disagree": 0.5, "two-of-three": pytest.approx(2 / 3), "all": 1.0, "none": 0.0}


VERDICTS = st.sampled_from(["violates", "follows", "unsure"])
VOTES = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), VERDICTS, st.booleans()), max_size=12)


@settings(deadline=None, max_examples=50)
@given(VOTES)
def test_the_last_decision_of_a_lead_counts_instead_of_the_labelers_verdicts(votes):
    rows = [replace(judgment(response, rule, verdict), decision=lead) for response, rule, verdict, lead in votes]
    expected = {}
    for asked in {vote[:2] for vote in votes}:
        given, decisions = ([vote[2] for vote in votes if vote[:2] == asked and vote[3] is lead] for lead in (False, True))
        decided = [verdict == "violates" for verdict in decisions[-1:] or given if verdict != "unsure"]
        if decided:
            expected[asked] = sum(decided) / len(decided)
    found = collect_judgments(rows)
    assert {(each.response, rule): target for each in found for rule, target in each.targets.items()} == expected


def test_a_response_on_which_nobody_decided_is_left_out():
    rows = [judgment("a", "x", "unsure"), judgment("b", "x", "follows"), judgment("a", "y", "unsure")]
    assert [item.response for item in collect_judgments(rows)] == ["b"]
    with pytest.raises(UserError, match="no decided rule judgments"):
        read_judgments([row.to_row() for row in rows[:1]], False, {"x": "X"}, ["f.yaml"])


def test_the_same_words_under_another_prompt_are_another_response():
    rows = [judgment("a", "x", "follows", "Hi"), judgment("a", "x", "violates", "Ho"), judgment("a", "y", "follows", "Hi")]
    assert [item.targets for item in collect_judgments(rows)] == [{"x": 0.0, "y": 0.0}, {"x": 1.0}]


def test_a_rule_without_a_text_is_named():
    rows = [judgment("a", "no-such-rule", "follows").to_row()]
    with pytest.raises(UserError, match=r"rule 'no-such-rule' is not in a\.yaml, b\.yaml"):
        read_judgments(rows, False, {"x": "X"}, ["a.yaml", "b.yaml"])


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 30), st.integers(1, 3), st.floats(0, 0.9), st.integers(0, 99))
def test_a_conversation_is_held_out_whole_and_a_held_out_rule_everywhere(prompts, responses, share, seed):
    rows = [
        judgment(f"r{k}", rule, "follows", f"p{p}") for p in range(prompts) for k in range(responses) for rule in ("x", "y")
    ]
    split = split_judgments(collect_judgments(rows), ["y"], share, seed)
    seen, held_out = ({str(item.prompt) for item in part} for part in (split.train, split.validation))
    assert seen
    assert not seen & held_out
    assert len(seen | held_out) == prompts
    assert len(held_out) == min(prompts - 1, round(share * prompts))
    assert all(set(item.targets) == {"x"} for item in (*split.train, *split.validation))
    assert [set(item.targets) for item in split.unseen] == [{"y"}] * (prompts * responses)
    assert split == split_judgments(collect_judgments(rows), ["y"], share, seed)


def test_rules_by_file_by_one_of_a_file_and_by_id():
    sparrow = "forms/rules/sparrow-dialogue.yaml"
    assert len(read_rules([sparrow])) == 23
    assert list(read_rules([f"{sparrow}:no-threats", f"{sparrow}:no-insults"])) == ["no-threats", "no-insults"]
    known = {"x": "X.", "y": "Y."}
    assert choose_rules([], known, "m") == known
    chosen = choose_rules(["y", f"{sparrow}:no-threats"], known, "m")
    assert chosen == {"y": "Y.", "no-threats": "Does not threaten anybody."}
    with pytest.raises(UserError, match="no rule 'no-treats'; did you mean no-threats"):
        read_rules([f"{sparrow}:no-treats"])
    with pytest.raises(UserError, match="m: no rule 'z'"):
        choose_rules(["z"], known, "m")
    with pytest.raises(UserError, match="rule 'no-threats' is defined twice"):
        read_rules([sparrow, f"{sparrow}:no-threats"])


def test_metrics_by_hand():
    judged = {
        "a": [(0.9, 1.0), (0.6, 0.0), (0.4, 1.0), (0.1, 0.0)],
        "b": [(0.2, 0.0), (0.8, 0.5)],
        "c": [(0.7, 0.75)],
    }
    scored = [ScoredJudgment(rule, *pair) for rule, pairs in judged.items() for pair in pairs]
    metrics = rule_metrics(scored)
    # Rule a: violated ones at .9 and .4, others at .6 and .1: three of four pairs in order; one of two right on each side.
    assert metrics["rule/a/auc"] == 0.75
    assert metrics["rule/a/balanced_accuracy"] == 0.5
    # One in each bin: |.9 - 1| + |.6 - 0| + |.4 - 1| + |.1 - 0| over 4.
    assert metrics["rule/a/calibration_error"] == pytest.approx(0.35)
    assert metrics["rule/a/violated"] == 0.5
    # b has one decided response and c has no other kind: neither can be told apart.
    assert not {"rule/b/auc", "rule/c/auc", "rule/b/balanced_accuracy"} & metrics.keys()
    assert metrics["auc"] == 0.75
    errors = (0.35, (0.2 + 0.3) / 2, 0.05)
    assert metrics["calibration_error"] == pytest.approx(sum(errors) / 3)
    losses = [-t * math.log(p) - (1 - t) * math.log(1 - p) for pairs in judged.values() for p, t in pairs]
    assert metrics["loss"] == pytest.approx(sum(losses) / 7)
    assert metrics["judgments"] == 7
    assert math.isfinite(rule_metrics([ScoredJudgment("a", 0.0, 1.0)])["loss"])  # of a certain model that is wrong


def test_geometric_mean():
    assert geometric_mean([0.5, 0.5]) == pytest.approx(0.5)
    assert geometric_mean([0.9, 0.4, 0.2]) == pytest.approx((0.9 * 0.4 * 0.2) ** (1 / 3))
    assert geometric_mean([0.0, 1.0]) == 0.0
    assert geometric_mean([]) == 1.0


def test_a_filter_keeps_the_highest_reward_among_those_that_obey_else_the_most_obedient():
    rewards, follows = [3.0, 2.0, 1.0], [[0.1, 0.9], [0.8, 0.7], [0.9, 0.9]]
    found = {threshold: best_response(rewards, follows, "filter", threshold) for threshold in (0.2, 0.5, 0.85)}
    assert found == {0.2: 0, 0.5: 1, 0.85: 2}  # the first has sqrt(.09) = .3
    assert best_response([9.0, 1.0], [[0.1], [0.2]], "filter", 0.5) == 1
    assert best_response([1.0, 2.0, 2.0], [[], [], []], "filter", 0.5) == 1  # rewards alone


def test_the_product_by_hand():
    # Mean reward 1: sigmoid(2) = .8808, sigmoid(0) = .5, sigmoid(-2) = .1192.
    rewards = [3.0, 1.0, -1.0]
    assert best_response(rewards, [[0.5], [0.9], [1.0]], "multiply", 0.5) == 1  # .4404, .4500, .1192
    assert best_response(rewards, [[0.52], [0.9], [1.0]], "multiply", 0.5) == 0  # .4580
    assert 1 / (1 + math.exp(-2)) * 0.52 == pytest.approx(0.4580, abs=1e-4)

    assert best_response([0.0, 0.0], [[0.2], [0.7]], "multiply", 0.5) == 1  # rules alone
    assert best_response([-1000.0, 1000.0], [[0.5], [0.5]], "multiply", 0.5) == 1
