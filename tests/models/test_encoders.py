import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForMaskedLM, BertForSequenceClassification

from align.batches.encoding import Limits, encode_rankings
from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.backbone import flops_profile, wrap
from align.models.heads import RewardModel, ScalarHead
from align.models.loading import from_objects, load
from align.ppo import PPOConfig, run_ppo
from align.reward.checkpoint import load_reward_model
from align.reward.rankings import reward_rankings
from align.reward.scoring import RewardModelScorer
from align.sft import SFTConfig, run_sft
from align.tokenization.encoded import SampledResponse
from tests.models.adapters import save_reward
from tests.models.encoders import CONFIGS, pair_tokenizer, write_encoder
from tests.refusals import refusal

ROWS = [
    {"prompt": "What is it?", "responses": ["A cat, I think, and not a dog.", "No"], "ranks": [1, 2]},
    {"prompt": "Hi", "responses": ["Hello there", "x", "Go away now, please"], "ranks": [1, 3, 2]},
]
OF_PPO = {"reward_functions": ["align.ppo.toy_rewards:brevity"]}
TEXTS = [(row["prompt"], response) for row in ROWS for response in row["responses"]]


CORE = ("bert", "deberta-v2", "big_bird")


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in CORE)) for name in CONFIGS])
def family(request):
    """Each family in turn; `make test` takes those that differ most."""
    return request.param


@pytest.fixture
def load_encoder(sharpen, tmp_path):
    """`load_encoder("bert", lora_r=4)`: an encoder as pretraining leaves it, loaded to be trained as a reward model."""

    def load_one(family, adapter="reward", **settings):
        folder = tmp_path / family
        if not folder.exists():
            write_encoder(family, folder, sharpen)
        torch.manual_seed(1)
        config = ModelConfig(model=str(folder), dtype="float32", **settings)
        return load(config, torch.float32, adapter=adapter, allow_reward_model=True)

    return load_one


def encoded(loaded):
    return encode_rankings(ROWS, loaded, Limits(200, 200), False)


def changed(loaded):
    """A reward model whose trained weights were all moved."""
    torch.manual_seed(6)
    model = RewardModel(loaded.backbone, ScalarHead(loaded.backbone.hidden_size, bias=False), loaded.adapter)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn_like(weight))
    return model


@torch.no_grad()
def scores_of(model, loaded):
    return reward_rankings(model, encoded(loaded), torch.device("cpu"))


@torch.no_grad()
def plain_scores(classifier, folder, texts=TEXTS):
    """What transformers itself computes: the tokenizer joins prompt and response."""
    rows = AutoTokenizer.from_pretrained(folder)(
        [p for p, _ in texts], [r for _, r in texts], padding=True, return_tensors="pt"
    )
    return classifier.eval()(**rows).logits[:, 0]


def test_a_saved_reward_model_is_a_classifier_of_plain_transformers(family, load_encoder, tmp_path):
    loaded = load_encoder(family)
    model = changed(loaded)
    expected = scores_of(model, loaded)
    assert expected.std() > 0.02
    save_reward(tmp_path / "reward", loaded, mean=0.5, head=model.head)
    classifier, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert classifier.config.num_labels == 1
    torch.testing.assert_close(plain_scores(classifier, tmp_path / "reward"), expected, atol=1e-5, rtol=0)
    again = load_reward_model(str(tmp_path / "reward"), "float32")
    torch.testing.assert_close(scores_of(again.model, again.loaded), expected, atol=1e-5, rtol=0)
    assert again.mean == 0.5


def test_a_saved_adapter_is_one_of_plain_peft(family, load_encoder, tmp_path):
    """It holds the poolers whole, which pretraining did not make."""
    loaded = load_encoder(family, lora_r=4)
    model = changed(loaded)
    expected = scores_of(model, loaded)
    with loaded.backbone.adapter(None):
        assert (model.head(loaded.backbone.summary(*some_rows())) - expected[:2]).abs().max() > 1e-3
    save_reward(tmp_path / "reward", loaded, mean=0.5, head=model.head)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / family, num_labels=1)
    classifier = PeftModel.from_pretrained(base, tmp_path / "reward")
    torch.testing.assert_close(plain_scores(classifier, tmp_path / "reward"), expected, atol=1e-5, rtol=0)
    again = load_reward_model(str(tmp_path / "reward"), "float32")
    torch.testing.assert_close(scores_of(again.model, again.loaded), expected, atol=1e-4, rtol=0)
    config = ModelConfig(model=str(tmp_path / "reward"), dtype="float32", lora_r=4)
    further = load(config, torch.float32, adapter="reward", allow_reward_model=True)
    found = scores_of(RewardModel(further.backbone, model.head, "reward"), further)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_any_classifier_of_an_encoder_is_a_reward_model(family, sharpen, tmp_path):
    """As OpenAssistant's: question and answer as a plain pair. A policy's own tokenizer does not matter."""
    folder = write_encoder(family, tmp_path / "theirs", sharpen, classifier=True)
    expected = plain_scores(AutoModelForSequenceClassification.from_pretrained(folder), folder)
    found = load_reward_model(folder, "float32")
    policy = load(ModelConfig(model="tiny-gpt2"), torch.float32).tokenization
    scorer = RewardModelScorer.from_loaded(found, policy, Accelerator(cpu=True), 999)
    sampled = [SampledResponse(({"role": "user", "content": prompt},), [1], [2], text) for prompt, text in TEXTS]
    assert scorer(sampled) == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_classifier_that_lacks_its_pooler_is_refused(sharpen, tmp_path):
    """Of a model that was trained for the task, nothing may be made up."""
    folder = write_encoder("bert", tmp_path / "theirs", sharpen, classifier=True)
    model = BertForSequenceClassification.from_pretrained(folder)
    state = {name: value for name, value in model.state_dict().items() if "pooler" not in name}
    model.save_pretrained(folder, state_dict=state)
    with pytest.raises(UserError, match=r"its weights lack 'bert.pooler.dense.bias'"):
        load_reward_model(folder, "float32")


def some_rows():
    return Padded.from_lists([[2, 50, 51, 1], [2, 60, 61, 62, 63, 64, 65, 1]]), Padded.from_lists([[70, 1], [80, 81, 82, 1]])


def test_a_row_is_the_same_alone_and_in_a_batch_in_any_order(family, load_encoder):
    """One response is so long that BigBird would leave full attention for it, and with it for the others."""
    backbone = load_encoder(family).backbone
    prompts = [[2, 50, 51, 1], [2, 60, 61, 62, 63, 64, 65, 1], [2, 9, 1]]
    responses = [[70, 71, 1, 2], [80] * 130 + [1, 2], [81, 82, 1, 2], [70, 71, 90, 1, 2]]
    owner = [0, 1, 1, 2]

    def rows(order):
        chosen = [prompts[owner[row]] for row in order], [responses[row] for row in order]
        return [Padded.from_lists(part) for part in chosen]

    with torch.no_grad():
        alone = torch.cat([backbone.summary(*rows([row])) for row in range(4)])
        for order in ([0, 1, 2, 3], [3, 2, 0], [2, 1]):
            torch.testing.assert_close(backbone.summary(*rows(order)), alone[order], atol=1e-5, rtol=0)
        indexed = backbone.summary(Padded.from_lists(prompts), Padded.from_lists(responses), torch.tensor(owner))
    torch.testing.assert_close(indexed, alone, atol=1e-5, rtol=0)
    assert alone.std(0).max() > 0.03


def test_prompt_and_response_are_told_apart_where_a_model_has_token_types(load_encoder):
    """The same tokens, cut elsewhere, are another text."""
    for family, differs in {"bert": True, "roberta": False, "deberta-v2": False}.items():
        backbone, row = load_encoder(family).backbone, [2, 50, 51, 1, 60, 61, 1]
        with torch.no_grad():
            early, late = (
                backbone.summary(Padded.from_lists([row[:cut]]), Padded.from_lists([row[cut:]])) for cut in (3, 4)
            )
        assert bool((early - late).abs().max() > 1e-4) == differs


def test_an_encoder_is_no_policy(family, sharpen, tmp_path):
    folder = write_encoder(family, tmp_path / family, sharpen)
    assert refusal(load, ModelConfig(model=folder), torch.float32) == (
        f"model '{folder}': model type '{family}' reads text in both directions (an encoder): it can be a reward model or a "
        "judge, not a language model; choose a decoder (GPT style) or an encoder-decoder (T5 style)"
    )
    for run, config, more in ((run_sft, SFTConfig, {}), (run_ppo, PPOConfig, OF_PPO)):
        with pytest.raises(UserError, match="not a language model"):
            run(config(model=folder, output_dir=str(tmp_path / "run"), **more))


def test_an_encoder_in_memory_needs_the_class_of_a_classifier():
    with pytest.raises(UserError, match="model type 'bert' reads text in both directions"):
        wrap(BertForMaskedLM(CONFIGS["bert"]).eval())
    model = BertForSequenceClassification(CONFIGS["bert"])
    loaded = from_objects(model, pair_tokenizer("bert"), ModelConfig(model="-", lora_r=2), "reward")
    assert loaded.adapter == "reward"
    with pytest.raises(UserError, match="not a language model"):
        loaded.backbone.prefill(Padded.from_lists([[5]]))


def test_a_text_is_shortened_inside_its_marks(load_encoder):
    for family, (before, between, after) in {"bert": ([2], [1], [1]), "roberta": ([2], [1, 1], [1])}.items():
        loaded = load_encoder(family)
        text = loaded.tokenization.chat.template_ids
        (whole, _), (short, _) = (
            encode_rankings(ROWS, loaded, limits, False) for limits in (Limits(99, 99), Limits(6, 5, "truncate"))
        )
        assert whole.prompt == [*before, *text("What is it?"), *between]
        assert whole.responses[1] == [*text("No"), *after]
        words = 6 - len(before) - len(between)
        assert short.prompt == [*before, *text("What is it?")[-words:], *between]
        assert short.responses[0] == [*text("A cat, I think")[: 5 - len(after)], *after]
        assert short.responses[1] == whole.responses[1]


def test_roberta_counts_positions_from_behind_its_padding_id(load_encoder):
    assert load_encoder("bert").backbone.context_length == 256
    roberta = load_encoder("roberta").backbone
    assert roberta.context_length == 255
    prompt, response = Padded.from_lists([[2] * 200]), Padded.from_lists([[2] * 55])
    assert roberta.summary(prompt, response).shape == (1, 32)
    with pytest.raises((IndexError, RuntimeError)):
        roberta.summary(prompt, Padded.from_lists([[2] * 56]))


def test_the_matrices_of_an_encoder_by_hand(load_encoder):
    """4 of attention, 2 of the feed-forward layer; ALBERT applies one layer twice, after a matrix from 16 to 32."""
    layer = 4 * 32 * 32 + 2 * 32 * 48
    bert, albert = (flops_profile(load_encoder(family).backbone, None).decoder for family in ("bert", "albert"))
    assert (sum(bert.matrices), bert.attention) == (2 * layer, 2 * 32)
    assert (sum(albert.matrices), albert.attention) == (2 * layer + 16 * 32, 2 * 32)
