"""The judge that ships: it loads as any reward model, and agrees with blind readers as often as data/README.md says."""

import json

import pytest
from accelerate import Accelerator

from align.builtin import zoo
from align.data.readers import read_records
from align.data.records import Ranking
from align.reward.checkpoint import is_reward_model, load_reward_model
from align.reward.scoring import RewardModelScorer
from align.tokenization.encoded import SampledResponse


@pytest.mark.full
def test_it_agrees_with_blind_readers(align_cache):
    folder = zoo.resolve_model("smollm2-135m-judge")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "smollm2-135m"
    assert is_reward_model("smollm2-135m-judge")
    reward = load_reward_model("smollm2-135m-judge", "float32")
    encode = reward.loaded.tokenization
    score = RewardModelScorer.from_loaded(reward, encode, Accelerator(cpu=True), 4096)
    rows = [
        row for row in read_records("data/comparisons_round1.jsonl", Ranking, skip_bad_rows=True) if len(set(row.ranks)) > 1
    ]
    read = [
        SampledResponse(row.prompt, encode.prompt_ids(row.prompt), encode.response_ids(text), text)
        for row in rows
        for text in row.responses
    ]
    rewards = iter(score(read))
    right = [(next(rewards) > next(rewards)) == (row.ranks[0] < row.ranks[1]) for row in rows]
    assert len(right) == 100
    assert sum(right) >= 66  # 73 where it was made; chance: 50, and 66 or more of 100 by chance once in 1,000 times
