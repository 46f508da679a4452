import math

import pytest

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.eval.reward import RewardEvalConfig, good_response_wins, read_benchmark, run_reward_eval, ties_score
from align.reward.checkpoint import load_reward_model
from tests.eval.files import values
from tests.files import write_rows

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


def test_four_by_hand():
    fours = ([3, 1, 2, 0], [1, 3, 2, 0], [2, 2, 1, 0], [1, 1, 1, 1])
    assert [good_response_wins(rewards) for rewards in fours] == [1.0, 0.0, 0.5, 0.25]


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
    with pytest.raises(UserError, match="subset Ties: invalid id 'x'"):
        ties_score([("x", 1, [1.0, 0.0])])


def rewards_alone(folder, row):
    """The reward of each response by itself."""
    found = load_reward_model(folder, "float32")
    tokenization = found.loaded.tokenization
    prompt = tokenization.prompt_ids(({"role": "user", "content": row["prompt"]},))
    texts = [tokenization.response_ids(text) for text in (*row["chosen"], *row["rejected"])]
    return [float(found.model(Padded.from_lists([prompt]), Padded.from_lists([ids]))) for ids in texts]


def test_a_reward_model_on_a_file(reward_folders, tmp_path):
    folder, benchmark = reward_folders["tiny-llama"], write_rows(tmp_path / "rows.jsonl", FOURS)
    settings = {"preferences": "", "benchmark": benchmark, "output": str(tmp_path / "out")}
    (found,) = run_reward_eval(RewardEvalConfig(reward_model=folder, dtype="float32", **settings))
    rewards = {row["id"]: rewards_alone(folder, row) for row in FOURS}
    math, focus = (good_response_wins(rewards[name]) for name in ("7", "8"))
    ties = ties_score([("ref:1", 1, rewards["ref:1"]), ("tied:1", 3, rewards["tied:1"])])
    assert found.task == "rewardbench-2"
    assert values(found.measurements) == {
        "Math": math,
        "Focus": focus,
        "Ties": pytest.approx(ties, abs=1e-5),
        "score": pytest.approx((math + focus + ties) / 3, abs=1e-5),
    }
    assert (tmp_path / "out" / "rewardbench-2.json").exists()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": 1, "prompt": "Hi", "chosen": ["a"], "subset": "x"}, "rows.jsonl:1: field 'rejected'"),
        ({"id": 1, "prompt": "Hi", "chosen": "a", "rejected": ["b"], "subset": "x"}, "rows.jsonl:1: field 'chosen'"),
        ({"id": 1, "prompt": "Hi", "chosen": [], "rejected": ["b"], "subset": "x"}, "rows.jsonl:1: field 'chosen'"),
        ({"id": 1, "prompt": "Hi", "chosen": ["a"], "rejected": ["b"]}, "rows.jsonl:1: field 'subset'"),
    ],
)
def test_a_bad_row_is_one_line(row, words, tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UserError, match=words) as caught:
        read_benchmark(source)
    assert "\n" not in str(caught.value)
