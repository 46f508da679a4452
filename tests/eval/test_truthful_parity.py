"""Log-likelihoods and measurements against what lm-eval 0.4.13 itself gave for the same questions.

The model behind lm_eval_truthful.json has SmolLM2's tokenizer on two random layers, so that lm-eval takes a minute:

python -m tests.eval.test_truthful_parity FOLDER
python -m benchmarks.eval_parity --model FOLDER --python ... --fixture tests/eval/lm_eval_truthful.json
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from align.eval.answers import open_context, open_models
from align.eval.questions import read_questions
from align.eval.truthfulness import QuestionFormat, TruthfulnessConfig, multiple_choice, score_choices
from align.model_registry.registry import resolve_model
from tests.research_data import ABSENT

CSV = Path(__file__).parents[3] / "shared" / "data" / "TruthfulQA.csv"
FIXTURE = Path(__file__).with_name("lm_eval_truthful.json")


def build(folder: Path) -> Path:
    """Write the model, the same weights every time, so large that its probabilities are far from uniform."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(**shape, **ends, vocab_size=len(tokenizer), max_position_embeddings=2048, tie_word_embeddings=True)
    model, generator = LlamaForCausalLM(config), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.dim() < 2:
                weight.copy_(1 + 0.1 * drawn)
            else:
                weight.copy_(drawn * (0.4 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.skipif(not CSV.exists(), reason=ABSENT)
def test_every_answer_and_every_figure_is_lm_evals(tmp_path):
    expected = json.loads(FIXTURE.read_text())
    by_id = {question.id: question for question in read_questions(str(CSV))}
    questions = [by_id[number] for number in expected["questions"]]
    assert len(questions) == 50
    config = TruthfulnessConfig(models=[str(build(tmp_path / "model"))], questions=str(CSV), dtype="float32")
    question_format = QuestionFormat.from_settings(config.prompt, config.few_shot, config.chat)
    evaluated = next(open_models(config.models, open_context(config.output, config)))
    rows = score_choices(evaluated, questions, question_format)
    for number, row in enumerate(rows):
        assert [row["best"], *row["incorrect"]] == pytest.approx(expected["mc1"]["log_likelihoods"][number], rel=0, abs=1e-3)
        both = [*row["correct"], *row["incorrect"]]
        assert both == pytest.approx(expected["mc2"]["log_likelihoods"][number], rel=0, abs=1e-3)
        found = multiple_choice(row["best"], row["correct"], row["incorrect"])
        assert found["mc1"] == expected["mc1"]["acc"][number]
        assert found["mc2"] == pytest.approx(expected["mc2"]["acc"][number], rel=0, abs=1e-4)
    assert len({round(row["best"], 2) for row in rows}) > 40


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
