"""An attribute model that was trained here, a decoder or an encoder, is a toxicity scorer."""

import pytest
import torch

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.data.conversation import user_turn
from align.eval.toxicity import ToxicityConfig, run_toxicity
from align.eval.toxicity_scorers import ScorerConfig, open_scorer
from align.extras.attributes import AttributeConfig, AttributeTrainer
from align.extras.attributes.model import load_attribute_model
from tests.extras.running import settings
from tests.files import write_rows
from tests.models.encoders import write_encoder

TEXTS = ["bad 3", "good 3", "a much longer text about nothing, which pads the others", "bad 20"]


def train(folder, model, **more):
    """A model with a rating and `toxic`, which is what says "bad"."""
    rows = [
        {"prompt": "Say it.", "response": f"{word} {n}", "attributes": {"rating": 3, "toxic": toxic}}
        for n in range(12)
        for word, toxic in (("bad", 1), ("good", 0))
    ]
    chosen = {"num_train_epochs": 15, "batch_size": 6, "validation_split": 0.25, "eval_steps": 1000} | more
    return str(AttributeTrainer(model, rows, AttributeConfig(**settings(folder, **chosen))).train())


@pytest.fixture(scope="module", params=["tiny-llama", "bert"])
def folder(request, tmp_path_factory, align_cache, sharpen):
    folder = tmp_path_factory.mktemp("attributes")
    model = request.param if request.param.startswith("tiny") else write_encoder(request.param, folder / "base", sharpen)
    return train(folder / "run", model)


def scorer(folder, **more):
    return open_scorer(ScorerConfig(scorer=f"attribute:{folder}", **more))


def test_scores_are_the_probabilities_of_the_head_in_any_batch(folder):
    model, loaded = load_attribute_model(folder, "float32")
    prompt, expected = loaded.tokenization.prompt_ids(user_turn("Say it.")), []
    for text in TEXTS:
        outputs = model(Padded.from_lists([prompt]), Padded.from_lists([loaded.tokenization.response_ids(text)]))
        expected.append(float(torch.sigmoid(outputs[0, 1])))  # heads are in the order of their names
    for batch in (1, 3, 64):
        found = scorer(folder, scorer_prompt="Say it.", scorer_batch=batch)
        assert found(TEXTS) == pytest.approx(expected, abs=1e-6)
    assert min(expected[0], expected[3]) > expected[1] + 0.1  # it learned what is toxic
    assert "after 'Say it.'" in found.title
    assert scorer(folder, scorer_prompt="Else?")(TEXTS) != pytest.approx(expected, abs=1e-6)


def test_the_evaluation_runs_on_it(folder, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "The river"}, {"prompt": "A stone"}])
    given = {"prompts": str(prompts), "samples": 2, "max_new_tokens": 4, "dtype": "float32"}
    config = ToxicityConfig(models=["tiny-llama"], output=str(tmp_path), scorer=f"attribute:{folder}", table=False, **given)
    (evaluation,) = run_toxicity(config)
    measurements = {measurement.name: measurement for measurement in evaluation.measurements}
    assert 0 < measurements["basic: mean toxicity"].value < 1
    assert measurements["basic: mean toxicity"].scorer.startswith(f"attribute:{folder} 'toxic' (")


def test_what_cannot_be_a_scorer_is_one_line(tmp_path_factory, align_cache, tmp_path):
    with pytest.raises(UserError, match=r"has no yes-or-no attribute 'rating'; set scorer_label to one it has: toxic$"):
        scorer(folder_of_heads := train(tmp_path / "heads", "tiny-llama", num_train_epochs=1), scorer_label="rating")
    with pytest.raises(UserError, match="the text 'word word") as caught:
        scorer(folder_of_heads)(["word " * 5000])
    assert "tokens" in str(caught.value)
    with pytest.raises(UserError, match="is of the generative form; name an attribute model with heads"):
        scorer(train(tmp_path / "generative", "tiny-llama", num_train_epochs=1, form="generative"))
    with pytest.raises(UserError, match="tiny-llama"):
        scorer("tiny-llama")
    with pytest.raises(UserError, match="scorer_prompt"):
        ScorerConfig(scorer_prompt=" ")
