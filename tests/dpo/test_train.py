"""DPO: the reference, the loss in batches, and the loss and gradient that TRL's trainer computes."""

import json
import math

import pytest
import torch

from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.dpo import DPOConfig, DPOTrainer
from align.dpo.train import PairLoss, ReferencedRanking, batch_loss, evaluate, log_probs_of, rankings_of, save
from align.models.heads import LanguageModel
from align.models.loading import load
from align.reward.rankings import group_sizes
from align.tokenization.encoded import EncodedRanking
from align.training.setup import build_engine
from tests.files import read_rows
from tests.models.losses import assert_invariant, loss_of_rows, rankings


class Stage:
    """A policy, the reference's log-probs of some rankings, and the loss with given settings."""

    def __init__(self, loaded, run, examples, reference=None, beta=0.1, loss="dpo", label_smoothing=0.0):
        self.loaded, self.pair_loss = loaded, PairLoss(loss, beta, label_smoothing)
        self.engine = build_engine(run, LanguageModel(loaded.backbone, loaded.adapter), 1)
        reference = reference or log_probs_of(examples, self.engine, loaded.backbone, 4096)
        self.examples = list(map(ReferencedRanking, examples, reference))

    @property
    def reference(self):
        return [item.log_probs for item in self.examples]

    def loss(self, rows=None):
        examples = self.examples if rows is None else [self.examples[row] for row in rows]
        return batch_loss(self.engine.module, examples, examples, self.pair_loss, self.loaded.backbone.device)

    def evaluate(self, examples=None):
        return evaluate(self.engine, self.loaded.backbone, examples or self.examples, self.pair_loss, 4096)


@pytest.fixture
def make_stage(make_run):
    """`make_stage(loaded, rankings, beta=0.5)`: the stage around a loaded model, with the reference as it is."""
    return lambda loaded, examples, reference=None, **values: Stage(
        loaded, make_run(DPOConfig, "dpo"), examples, reference, **values
    )


def moved(rows, seed=4):
    """Log-probs as a reference that is some nats away would say them."""
    generator = torch.Generator().manual_seed(seed)
    return [[value + 5 * float(torch.randn((), generator=generator)) for value in row] for row in rows]


@torch.no_grad()
def log_prob(loaded, prompt, response):
    """Of a response, from the logits alone."""
    with loaded.backbone.adapter(loaded.adapter):
        hidden = loaded.backbone.hidden(Padded.from_lists([prompt]), Padded.from_lists([response]))
        every = torch.log_softmax(loaded.backbone.logits(hidden[0, :-1]).double(), -1)
    return sum(float(every[place, token]) for place, token in enumerate(response))


@pytest.mark.parametrize(("lora_r", "settings"), [(0, {}), (4, {"label_smoothing": 0.2}), (0, {"loss": "ipo"})], ids=str)
def test_padding_order_and_micro_batches_change_nothing(tiny_name, load_sharp, make_stage, hand_rollout, lora_r, settings):
    loaded = load_sharp(tiny_name, lora_r=lora_r)
    stage = make_stage(loaded, rankings(hand_rollout), beta=0.5, **settings)
    examples = list(map(ReferencedRanking, rankings(hand_rollout), moved(stage.reference)))
    loss_of = loss_of_rows(batch_loss, stage.engine, examples, pair_loss=stage.pair_loss)
    assert_invariant(stage.engine, group_sizes(loaded.backbone, rankings_of(examples)), loss_of)


def test_the_loss_is_equation_7_over_all_untied_pairs(tiny_name, load_sharp, make_stage, hand_rollout):
    loaded = load_sharp(tiny_name)
    examples = rankings(hand_rollout)[:2]
    reference = moved([[log_prob(loaded, item.prompt, row) for row in item.responses] for item in examples])
    stage = make_stage(loaded, examples, reference, beta=0.2)
    expected = 0.0
    for item, before in zip(examples, reference, strict=True):
        ratios = [log_prob(loaded, item.prompt, row) - ref for row, ref in zip(item.responses, before, strict=True)]
        pairs = [(i, j) for i, a in enumerate(item.ranks) for j, b in enumerate(item.ranks) if a < b]
        terms = [math.log1p(math.exp(-0.2 * (ratios[i] - ratios[j]))) for i, j in pairs]
        expected += sum(terms) / len(terms) / 2
    assert float(stage.loss()[0].detach()) == pytest.approx(expected, abs=1e-5)


def test_the_margin_is_that_of_the_rewards(sharp_folders, tmp_path):
    rows = [{"prompt": f"Hi {number}", "chosen": "Yes, please.", "rejected": "No."} for number in range(4)]
    config = DPOConfig(output_dir=str(tmp_path), dtype="float32", report_to=["none"], batch_size=2, learning_rate=1e-3)
    DPOTrainer(sharp_folders["tiny-llama"], rows, config).train()
    last = read_rows(tmp_path / "metrics.jsonl")[-1]
    assert last["rewards/margin"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-5)
    assert last["rewards/margin"] != 0.0


@pytest.mark.parametrize("lora_r", [0, 4])
def test_the_policy_is_its_own_reference_at_first(tiny_name, load_sharp, make_stage, hand_rollout, lora_r):
    examples = rankings(hand_rollout)
    stage = make_stage(load_sharp(tiny_name, lora_r=lora_r), examples)
    loss, sums = stage.loss()
    assert float(loss.detach()) == pytest.approx(math.log(2), abs=1e-6)
    assert float(sums["rewards/chosen"]) == pytest.approx(0.0, abs=1e-6)
    assert stage.evaluate()[0]["validation/loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_validation_sees_the_policy_as_a_reward_model(load_sharp, make_stage):
    examples = [
        EncodedRanking([9, 10], [[20, 21], [22], [23, 24, 25]], [2, 1, 2]),
        EncodedRanking([9], [[20], [21]], [1, 2]),
    ]
    loaded = load_sharp("tiny-llama")
    stage = make_stage(loaded, examples, beta=0.5)
    # As if log-ratios of 1, 4, -1 and 0, 2 had been learned.
    reference = [
        [a - b for a, b in zip(row, ratios, strict=True)]
        for row, ratios in zip(stage.reference, ([1, 4, -1], [0, 2]), strict=True)
    ]
    found, scored = stage.evaluate(list(map(ReferencedRanking, examples, reference)))
    # Rewards .5, 2, -.5: 1.5 and 2.5 apart, ln(1 + exp(-1.5)) = .2014133, ln(1 + exp(-2.5)) = .0788897; 0, 1: 1.3132617.
    assert found["validation/loss"] == pytest.approx(((0.2014133 + 0.0788897) / 2 + 1.3132617) / 2, abs=1e-5)
    assert found["validation/accuracy"] == pytest.approx(2 / 3)
    save(loaded, stage.engine, "", found, scored)
    folder = stage.engine.run.folder
    rows = json.loads((folder / "validation.json").read_text())
    assert [row["rewards"] for row in rows] == [pytest.approx([0.5, 2, -0.5], abs=1e-5), pytest.approx([0, 1], abs=1e-5)]
    assert load(ModelConfig(model=str(folder / "model"), dtype="float32"), torch.float32).adapter is None


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_loss_and_gradient_are_those_of_trl(load_sharp, sharp_folders, make_stage, tmp_path, name, kind):
    """The same three pairs, as token ids, before TRL's trainer and before ours, with a policy that is not its reference."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig as TheirConfig
    from trl import DPOTrainer as TheirTrainer
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    pairs = [([9, 10, 11], [20, 21], [22]), ([12], [30, 31, 32, 33], [34, 35]), ([13, 14], [40], [41, 42, 43, 44, 45])]
    settings = TheirConfig(
        str(tmp_path), beta=0.5, loss_type={"dpo": "sigmoid", "ipo": "ipo"}[kind], report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_dropout=True,
    )  # fmt: skip
    policy, reference = (AutoModelForCausalLM.from_pretrained(sharp_folders[name], dtype=torch.float32) for _ in range(2))
    ours = load_sharp(name)
    with torch.no_grad():
        for model in (policy, ours.backbone.model):
            for weight in model.parameters():
                weight.mul_(1.2)
    data = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3)  # the trainer wants some at its start
    tokenizer = AutoTokenizer.from_pretrained(sharp_folders[name])
    theirs = TheirTrainer(policy, reference, settings, train_dataset=data, processing_class=tokenizer)
    batch = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), pair, strict=True)) for pair in pairs]
    expected = theirs.compute_loss(theirs.model, DataCollatorForPreference(pad_token_id=0)(batch))
    expected.backward()

    examples = [EncodedRanking(prompt, [chosen, rejected], [1, 2]) for prompt, chosen, rejected in pairs]
    start = load_sharp(name)
    before = [[log_prob(start, item.prompt, row) for row in item.responses] for item in examples]
    found, sums = make_stage(ours, examples, before, beta=0.5, loss=kind).loss()
    found.backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert abs(float(found.detach()) - math.log(2)) > 0.02  # not the loss of a policy that is its reference
    assert float(sums["rewards/chosen"]) == pytest.approx(theirs._metrics["eval"]["rewards/chosen"][0], abs=1e-4)
    gradients = dict(policy.named_parameters())
    for parameter, weight in ours.backbone.model.named_parameters():
        bound = 1e-4 * max(1e-2, float(gradients[parameter].grad.abs().max()))
        torch.testing.assert_close(weight.grad, gradients[parameter].grad, atol=bound, rtol=1e-3, msg=parameter)
