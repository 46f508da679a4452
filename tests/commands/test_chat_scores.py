"""Figures of tokens in `align chat --web`: log-ratios by transformers' own logits, and values that end in the reward."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from align import cli
from align.commands.chat import Scorer, Speaker
from align.commands.chat_room import log_ratios, require_comparable, token_values
from align.core.errors import UserError
from align.sampling.generation import SamplingParams
from tests.commands.words import words_of

ASKED = [{"role": "user", "content": "Hi"}]


def answer_of(speaker):
    *_, answer = speaker.answer(ASKED, SamplingParams(8, temperature=1.0))
    return answer


def test_log_ratios_are_differences_of_log_probs(sharp_folders):
    speaker, reference = Speaker(sharp_folders["tiny-gpt2"], "float32"), Speaker("tiny-gpt2", "float32")
    require_comparable(speaker, reference)
    answer = answer_of(speaker)
    figures = log_ratios(speaker, reference, answer)
    rows, ids = torch.tensor([answer.prompt + answer.ids]), torch.tensor(answer.ids)
    chosen = []
    for each in (speaker, reference):
        model = AutoModelForCausalLM.from_pretrained(each.loaded.base, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(rows).logits[0, len(answer.prompt) - 1 : -1]
        chosen.append(logits.log_softmax(-1)[range(len(ids)), ids])
    assert figures.values == pytest.approx((chosen[0] - chosen[1]).tolist(), abs=1e-4)
    assert len(figures.texts) == len(figures.values) == len(answer.ids)
    assert max(map(abs, figures.values)) > 0.1
    assert log_ratios(speaker, speaker, answer).values == [0.0] * len(answer.ids)


@pytest.mark.parametrize("policy", ["tiny-llama", "tiny-t5"])
def test_the_last_value_is_the_reward(policy, sharp_folders, tmp_path):
    rows = [{"prompt": f"{i}?", "responses": ["yes", "no"], "ranks": [1, 2]} for i in range(8)]
    (tmp_path / "ranked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "shown.jsonl").write_text(json.dumps({"prompt": "Hi", "completion": "Hello"}) + "\n")
    settings = {"train_data": tmp_path / "ranked.jsonl", "demonstrations": tmp_path / "shown.jsonl", "report_to": "none"}
    cli.main(["reward", *words_of(model=sharp_folders["tiny-gpt2"], output_dir=tmp_path / "run", **settings)])
    speaker, scorer = Speaker(sharp_folders[policy], "float32"), Scorer(str(tmp_path / "run"), "float32")
    answer = answer_of(speaker)
    figures = token_values(speaker, scorer, answer)
    assert scorer.reward.mean != 0.0
    assert figures.values[-1] == pytest.approx(scorer.score(speaker, answer), abs=1e-5)
    assert len(figures.texts) == len(figures.values)


def test_models_with_other_tokens_are_not_compared():
    with pytest.raises(UserError, match="its tokenizer or chat template differs from that of tiny-gpt2"):
        require_comparable(Speaker("tiny-gpt2", "float32"), Speaker("tiny-t5", "float32"))
