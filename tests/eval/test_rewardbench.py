"""RewardBench and RewardBench 2: their scoring by hand, and a reward model on rows of both forms."""

import math

import pytest

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.eval.reward import RewardEvalConfig, run_reward_eval
from align.eval.rewardbench import good_response_wins, read_benchmark, section_scores, ties_score
from align.reward.checkpoint import load_reward_model
from tests.eval.files import values
from tests.files import write_rows

PAIRS = [
    {"id": 1, "prompt": "Hi", "chosen": "Hello!", "rejected": "Go", "subset": "alpacaeval-easy"},
    {"id": 2, "prompt": "Hi you", "chosen": "Yes?", "rejected": "No.", "subset": "alpacaeval-easy"},
    {"id": 3, "prompt": "Add", "chosen": "1 + 1", "rejected": "1 - 1", "subset": "math-prm"},
    {"id": 4, "prompt": "Sub", "chosen": "2 - 1", "rejected": "2 + 1", "subset": "hep-go"},
]
FOURS = [
    {"id": "7", "prompt": "What?", "chosen": ["This."], "rejected": ["a", "bb", "ccc"], "subset": "Math"},
    {"id": "8", "prompt": "Who?", "chosen": ["Me"], "rejected": ["you", "they", "we"], "subset": "Focus"},
    {"id": "ref:1", "prompt": "A color", "chosen": ["red"], "rejected": ["dog"], "subset": "Ties"},
    {
        "id": "tied:1",
        "prompt": "Any color",
        "chosen": ["red", "blue", "green"],
        "rejected": ["dog", "cat"],
        "subset": "Ties",
    },
]


def test_a_pair_and_four_by_hand():
    assert [good_response_wins(rewards, True) for rewards in ([2.0, 1.0], [1.0, 1.0], [0.0, 1.0])] == [1.0, 0.0, 0.0]
    fours = ([3, 1, 2, 0], [1, 3, 2, 0], [2, 2, 1, 0], [1, 1, 1, 1])
    assert [good_response_wins(rewards, False) for rewards in fours] == [1.0, 0.0, 0.5, 0.25]


def test_sections_by_hand():
    found = section_scores({"alpacaeval-easy": 0.9, "mt-bench-med": 0.5, "math-prm": 0.5, "hep-go": 1.0})
    # (100 x .9 + 40 x .5) / 140, and (984 x .5 + 164) / 1148; no subset of the other sections is there.
    assert found == {"Chat": pytest.approx(110 / 140), "Reasoning": pytest.approx(656 / 1148)}


def test_ties_by_hand():
    rows = [
        ("ref:1", 1, [3.0, 1.0]),  # leads by 2
        ("tied:1", 2, [2.0, 1.5, 0.5]),  # spread .5, leads by 1: closer together, with the reference too
        ("ref:2", 1, [0.0, 1.0]),  # loses by 1
        ("tied:2", 2, [3.0, 1.0, 0.0]),  # spread 2, leads by 1
    ]
    margin = (math.tanh(1 / 0.5 - 1) + math.tanh(-1 / 2 - 1)) / 2
    assert ties_score(rows) == pytest.approx(0.3 * 1 + 0.3 * 0.5 + 0.2 * 0.5 + 0.2 * 0.5 + 0.01 * margin)
    assert ties_score([("ref:1", 1, [1.0, 0.0])]) == pytest.approx(0.3)
    # Good answers of equal reward: the margin is without bound, tanh makes 1 of it.
    assert ties_score([("ref:1", 1, [1.0, 0.0]), ("tied:1", 2, [1.0, 1.0, 0.0])]) == pytest.approx(1.01)
    with pytest.raises(UserError, match="the row 'x' of the subset Ties: an id there is tied:<number> or ref:<number>"):
        ties_score([("x", 1, [1.0, 0.0])])


def rewards_alone(folder, row):
    """The reward of each response by itself."""
    found = load_reward_model(folder, "float32")
    tokenization = found.loaded.tokenization
    prompt = tokenization.prompt_ids(({"role": "user", "content": row["prompt"]},))
    listed = [row[name] if isinstance(row[name], list) else [row[name]] for name in ("chosen", "rejected")]
    texts = [tokenization.response_ids(text) for text in (*listed[0], *listed[1])]
    return [float(found.model(Padded.from_lists([prompt]), Padded.from_lists([ids]))) for ids in texts]


@pytest.mark.parametrize("rows", [PAIRS, FOURS], ids=["RewardBench", "RewardBench 2"])
def test_a_reward_model_on_a_file(rows, reward_folders, tmp_path):
    folder = reward_folders["tiny-llama"]
    settings = {"preferences": "", "benchmark": write_rows(tmp_path / "rows.jsonl", rows), "output": str(tmp_path / "out")}
    (found,) = run_reward_eval(RewardEvalConfig(reward_model=folder, dtype="float32", **settings))
    rewards = {row["id"]: rewards_alone(folder, row) for row in rows}
    scores = values(found.measurements)
    results = {name: good_response_wins(found, rows is PAIRS) for name, found in rewards.items()}
    if rows is PAIRS:
        assert found.task == "rewardbench"
        assert scores["alpacaeval-easy"] == (results[1] + results[2]) / 2
        assert scores["Reasoning"] == pytest.approx((984 * results[3] + 164 * results[4]) / 1148)
        assert scores["score"] == pytest.approx((scores["Chat"] + scores["Reasoning"]) / 2)
    else:
        assert found.task == "rewardbench-2"
        ties = ties_score([("ref:1", 1, rewards["ref:1"]), ("tied:1", 3, rewards["tied:1"])])
        assert scores == {
            "Math": results["7"],
            "Focus": results["8"],
            "Ties": pytest.approx(ties, abs=1e-5),
            "score": pytest.approx((results["7"] + results["8"] + ties) / 3, abs=1e-5),
        }
    assert (tmp_path / "out" / f"{found.task}.json").exists()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": 1, "prompt": "Hi", "chosen": "a", "subset": "x"}, "rows.jsonl:1: field 'rejected'"),
        ({"id": 1, "prompt": "Hi", "chosen": [], "rejected": ["b"], "subset": "x"}, "rows.jsonl:1: field 'chosen'"),
        ({"id": 1, "prompt": "Hi", "chosen": "a", "rejected": "b"}, "rows.jsonl:1: field 'subset'"),
        (None, "it holds rows of RewardBench and of RewardBench 2"),
    ],
)
def test_a_bad_row_is_one_line(row, words, tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [row] if row else [PAIRS[0], FOURS[0]])
    with pytest.raises(UserError, match=words) as caught:
        read_benchmark(source, "test")
    assert "\n" not in str(caught.value)
