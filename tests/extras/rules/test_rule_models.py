import json
import math

import pytest
import torch
from accelerate import Accelerator

from align import cli
from align.batches.encoding import Limits
from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.statistics import roc_auc
from align.extras.attributes.heads import HeadForm
from align.extras.attributes.model import Head
from align.extras.rules import RuleConfig, RuleTrainer
from align.extras.rules.judgments import JudgedResponse, RuleScorer, encode_judgments, read_rules, rule_ids, rules_of_model
from align.extras.rules.train import judgment_loss
from align.models.heads import RewardModel, ScalarHead
from align.models.loading import load
from align.reward.checkpoint import RULE, LoadedReward, is_external, load_reward_model
from align.reward.rankings import reward_rankings
from align.reward.scoring import RewardModelScorer
from tests.conftest import TINY
from tests.extras.running import settings
from tests.files import read_rows
from tests.models.encoders import write_encoder

from .planted import RULES, judgments, sampled

TEXTS = {"no-digits": "Contains no digit.", "short": "Is short.", "kind": "Is kind to people, whoever they are."}


def a_scorer(loaded, budget=4096):
    torch.manual_seed(1)
    model = RewardModel(loaded.backbone, ScalarHead(loaded.backbone.hidden_size, bias=False), loaded.adapter)
    reward = LoadedReward(model.eval().requires_grad_(False), loaded, 0.0)
    return RewardModelScorer.from_loaded(reward, loaded.tokenization, Accelerator(cpu=True), budget)


@pytest.mark.parametrize("lora_r", [0, 4])
@pytest.mark.parametrize("name", [*TINY, "bert"])
def test_rules_of_a_shared_row_are_read_as_if_alone(load_sharp, name, lora_r, sharpen, tmp_path):
    """Packed = separate, to 1e-5, for several responses and rules of different lengths, in training and in scoring."""
    if name == "bert":  # prompt and response are its first text, the rule is the second
        config = ModelConfig(model=write_encoder(name, tmp_path / "base", sharpen), dtype="float32", lora_r=lora_r)
        loaded = load(config, torch.float32, adapter="reward", allow_reward_model=True)
    else:
        loaded = load_sharp(name, adapter="reward", lora_r=lora_r)
    scorer = a_scorer(loaded)
    pairs = (("What is it?", "It is 7 o'clock."), ("Why?", "Because."))
    responses = [sampled(loaded.tokenization, *pair) for pair in pairs]
    together = RuleScorer(scorer, TEXTS, loaded.tokenization)(responses)
    assert together.shape == (3, 2)
    assert float(together.std()) > 1e-3  # else equality would say nothing
    for row, (rule, text) in enumerate(TEXTS.items()):
        alone = RuleScorer(scorer, {rule: text}, loaded.tokenization)
        for column, response in enumerate(responses):
            assert alone([response]).item() == pytest.approx(together[row, column].item(), abs=1e-5)
    judged = [JudgedResponse(r.conversation, r.text, dict.fromkeys(TEXTS, 0.5)) for r in responses]
    encoded = encode_judgments(judged, TEXTS, loaded, Limits(128, 64))
    assert encoded[0].prompt == [*responses[0].prompt_ids, *responses[0].ids]
    logits = reward_rankings(scorer.module, encoded, torch.device("cpu")).reshape(2, 3).T
    assert torch.allclose(torch.sigmoid(logits), together, atol=1e-5)


def test_the_rule_comes_last_and_the_response_is_read_to_its_end(load_sharp, tiny_name):
    loaded = load_sharp(tiny_name)
    tokenization = loaded.tokenization
    judged = JudgedResponse(({"role": "user", "content": "Hi"},), "Ho 1", {"short": 1.0})
    (item,) = encode_judgments([judged], TEXTS, loaded, Limits(64, 64))
    assert item.prompt == [*tokenization.prompt_ids(judged.prompt), *tokenization.response_ids("Ho 1")]
    assert item.responses == [rule_ids(tokenization, "Is short.")]
    assert tokenization.text(item.responses[0]) == "Rule: Is short.\nVerdict:"
    assert item.targets == (1.0,)


def config_of(folder, **more):
    return RuleConfig(**settings(folder, validation_split=0.2, **({"rules": RULES} | more)))


def last_metrics(folder):
    return read_rows(folder.parent / "metrics.jsonl")[-1]


def test_a_rule_model_is_never_taken_for_a_reward_model(tmp_path, align_cache, command_error):
    folder = RuleTrainer("tiny-gpt2", judgments(8), config_of(tmp_path / "rules")).train()
    assert not is_external(str(folder))
    words = ["ppo", "--model", "tiny-gpt2", "--output_dir", str(tmp_path / "ppo"), "--reward_model", str(folder)]
    assert "neither a reward model of this package" in command_error(cli.main, words)


@pytest.mark.parametrize(("model", "more"), [("tiny-t5", {}), ("tiny-llama", {"lora_r": 4})])
def test_t5_and_adapters_train_and_load(tmp_path, align_cache, model, more):
    """Held-out rules are measured and not trained on; what is saved loads and judges as in memory."""
    rows = judgments(24, rules=("no-digits", "no-exclamation-marks"))
    config = config_of(tmp_path / "rules", held_out_rules=["no-digits"], **more)
    trainer = RuleTrainer(model, rows, config)
    assert {rule for item in trainer.order.examples for rule in item.rules} == {"no-exclamation-marks"}
    folder = trainer.train()
    metrics = last_metrics(folder)
    assert metrics["held_out_rules/judgments"] == 48
    assert rules_of_model(str(folder)) == read_rules([f"{RULES[0]}:no-exclamation-marks"])
    loaded = load_reward_model(str(folder), "float32", kind=RULE)
    device = torch.device("cpu")
    with torch.no_grad():
        in_memory = reward_rankings(trainer.engine.module, trainer.held_out, device)
        of_unseen = reward_rankings(trainer.engine.module, trainer.form.unseen, device)
    violated = [target for item in trainer.form.unseen for target in item.targets]
    assert 0 < sum(violated) < 48
    assert metrics["held_out_rules/rule/no-digits/violated"] == pytest.approx(sum(violated) / 48, abs=1e-6)
    assert metrics["held_out_rules/rule/no-digits/auc"] == pytest.approx(roc_auc(of_unseen.tolist(), violated), abs=1e-3)
    assert {f"held_out_rules/rule/no-digits/{name}" for name in ("balanced_accuracy", "calibration_error")} <= metrics.keys()
    assert torch.allclose(reward_rankings(loaded.model, trainer.held_out, device), in_memory, atol=1e-5)
    written = json.loads((folder.parent / "validation.json").read_text())
    assert torch.sigmoid(in_memory).tolist() == pytest.approx([row["probability"] for row in written], abs=1e-5)


def test_settings_that_leave_nothing_to_learn_from(tmp_path, align_cache):
    with pytest.raises(UserError, match=r"held_out_rules: no judgments by rule 'no-digit' in .*; did you mean no-digits"):
        RuleTrainer("tiny-llama", judgments(4), config_of(tmp_path / "a", held_out_rules=["no-digit"]))
    with pytest.raises(UserError, match="no training data left"):
        RuleTrainer("tiny-llama", judgments(4), config_of(tmp_path / "b", held_out_rules=["no-digits"]))
    with pytest.raises(UserError, match=r"rules is \[\]"):
        config_of(tmp_path / "c", rules=[])


def test_judged_responses_that_drop_leaves_out_are_counted(load_sharp, caplog):
    loaded, prompt = load_sharp("tiny-gpt2"), ({"role": "user", "content": "Hi"},)
    judged = [JudgedResponse(prompt, "x" * length, {"short": 1.0}) for length in (1, 90, 2)]
    assert len(encode_judgments(judged, TEXTS, loaded, Limits(64, 64, "drop"))) == 2
    assert len(HeadForm(loaded, [Head("short", "binary")]).encode(judged, Limits(64, 64, "drop"))) == 2
    line = "dropped 1 of 3 judged responses (1 over max_response_tokens 64)"
    assert caplog.messages == [f"rule judgments: {line}", f"attribute judgments: {line}"]


def test_losses_of_labelers_who_disagree_and_of_several_rules_by_hand():
    # p = sigmoid(1) = .7310586; half of -log p = .3132617 and half of -log(1 - p) = 1.3132617.
    logits = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    loss = judgment_loss(logits, torch.tensor([0.5]))
    assert loss.item() == pytest.approx(0.8132617, abs=1e-7)
    loss.backward()
    assert logits.grad.item() == pytest.approx(0.7310586 - 0.5, abs=1e-7)  # it pulls toward their share
    logits, targets = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([1.0, 1.0, 1 / 3])
    by_hand = math.log(2) + math.log1p(math.exp(-2)) + (math.log1p(math.exp(1)) / 3 + 2 * math.log1p(math.exp(-1)) / 3)
    assert judgment_loss(logits, targets).item() == pytest.approx(by_hand, abs=1e-6)
    logits = torch.tensor([-1000.0, 1000.0], requires_grad=True)
    loss = judgment_loss(logits, torch.tensor([1.0, 0.0]))
    loss.backward()
    assert loss.item() == 2000.0
    assert logits.grad.tolist() == [-1.0, 1.0]
