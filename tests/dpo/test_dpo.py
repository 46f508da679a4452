"""DPO: the losses by hand, the reference, and the loss and gradient that TRL's trainer computes."""

import json
import math

import pytest
import torch

from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.dpo import DPOConfig
from align.dpo.loss import dpo_losses, ipo_losses
from align.dpo.train import DPOTask
from align.models.heads import LanguageModel
from align.models.loading import load
from align.tokenization.encoded import EncodedRanking
from align.training.start import build_engine
from tests.models.losses import assert_invariant, rankings


@pytest.fixture
def make_task(make_run):
    """`make_task(loaded, rankings, beta=0.5)`: the task around a loaded model, with the reference as it is."""

    def make(loaded, examples, reference=None, held_out=(), **settings):
        run = make_run(DPOConfig, "dpo", **settings)
        engine = build_engine(run, LanguageModel(loaded.backbone, loaded.adapter), 1)
        task = DPOTask(run, run.config, loaded, engine, examples, list(held_out))
        if reference is None:
            task.read_reference()
        else:
            task.reference = reference
        return task

    return make


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


@pytest.mark.parametrize(("lora_rank", "settings"), [(0, {}), (4, {"label_smoothing": 0.2}), (0, {"loss": "ipo"})], ids=str)
def test_padding_order_and_micro_batches_change_nothing(tiny_name, load_sharp, make_task, hand_rollout, lora_rank, settings):
    loaded = load_sharp(tiny_name, lora_rank=lora_rank)
    task = make_task(loaded, rankings(hand_rollout), beta=0.5, **settings)
    task.reference = moved(task.reference)
    assert_invariant(task.engine, task.lengths, task.loss)


def test_the_loss_is_equation_7_over_all_untied_pairs(tiny_name, load_sharp, make_task, hand_rollout):
    loaded = load_sharp(tiny_name)
    examples = rankings(hand_rollout)[:2]
    reference = moved([[log_prob(loaded, item.prompt, row) for row in item.responses] for item in examples])
    task = make_task(loaded, examples, reference, beta=0.2)
    expected = 0.0
    for item, before in zip(examples, reference, strict=True):
        ratios = [log_prob(loaded, item.prompt, row) - ref for row, ref in zip(item.responses, before, strict=True)]
        pairs = [(i, j) for i, a in enumerate(item.ranks) for j, b in enumerate(item.ranks) if a < b]
        terms = [math.log1p(math.exp(-0.2 * (ratios[i] - ratios[j]))) for i, j in pairs]
        expected += sum(terms) / len(terms) / 2
    loss, sums = task.loss([0, 1])([0, 1])
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-5)
    found = task.metrics({name: float(value) for name, value in sums.items()} | {"loss": 0.0})
    assert found["rewards/margin"] == pytest.approx(found["rewards/chosen"] - found["rewards/rejected"])


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_policy_is_its_own_reference_at_first(tiny_name, load_sharp, make_task, hand_rollout, lora_rank):
    examples = rankings(hand_rollout)
    task = make_task(load_sharp(tiny_name, lora_rank=lora_rank), examples, held_out=examples)
    loss, sums = task.loss([0, 1, 2, 3])([0, 1, 2, 3])
    assert float(loss.detach()) == pytest.approx(math.log(2), abs=1e-6)
    assert float(sums["rewards/chosen"]) == pytest.approx(0.0, abs=1e-6)
    assert task.evaluate()["validation/loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_the_reference_of_a_new_adapter_is_the_base(tiny_name, load_sharp, make_task, hand_rollout):
    examples = rankings(hand_rollout)
    adapted = make_task(load_sharp(tiny_name, lora_rank=4, fresh_adapter=True), examples)
    bare = make_task(load_sharp(tiny_name), examples)
    for one, other in zip(adapted.reference, bare.reference, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_validation_sees_the_policy_as_a_reward_model(load_sharp, make_task):
    examples = [
        EncodedRanking([9, 10], [[20, 21], [22], [23, 24, 25]], [2, 1, 2]),
        EncodedRanking([9], [[20], [21]], [1, 2]),
    ]
    loaded = load_sharp("tiny-llama")
    task = make_task(loaded, examples, held_out=examples, beta=0.5)
    now = task.held_out_reference
    # As if log-ratios of 1, 4, -1 and 0, 2 had been learned.
    task.held_out_reference = [
        [a - b for a, b in zip(row, ratios, strict=True)] for row, ratios in zip(now, ([1, 4, -1], [0, 2]), strict=True)
    ]
    found = task.evaluate()
    # Rewards .5, 2, -.5: 1.5 and 2.5 apart, ln(1 + exp(-1.5)) = .2014133, ln(1 + exp(-2.5)) = .0788897; 0, 1: 1.3132617.
    assert found["validation/loss"] == pytest.approx(((0.2014133 + 0.0788897) / 2 + 1.3132617) / 2, abs=1e-5)
    assert found["validation/accuracy"] == pytest.approx(2 / 3)
    task.save(found)
    rows = json.loads((task.run.folder / "validation.json").read_text())
    assert [row["rewards"] for row in rows] == [pytest.approx([0.5, 2, -0.5], abs=1e-5), pytest.approx([0, 1], abs=1e-5)]
    assert load(ModelConfig(model=str(task.folder), dtype="float32"), torch.float32).adapter is None


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("difference", "beta", "smoothing", "expected"),
    [
        (0.0, 0.1, 0.0, 0.6931472),  # ln 2: the policy is its reference
        (10.0, 0.1, 0.0, 0.3132617),  # ln(1 + exp(-1))
        (-10.0, 0.1, 0.0, 1.3132617),  # 1 more
        (10.0, 0.5, 0.0, 0.0067153),  # ln(1 + exp(-5))
        (10.0, 0.1, 0.1, 0.4132617),  # .9 x .3132617 + .1 x 1.3132617
        (0.0, 0.1, 0.3, 0.6931472),
    ],
)
def test_dpo_by_hand(difference, beta, smoothing, expected):
    assert dpo_losses(doubles(difference), beta, smoothing).item() == pytest.approx(expected, abs=1e-7)


def test_the_gradient_of_dpo_weighs_pairs_by_how_wrong_they_are():
    difference = doubles(10.0, -10.0).requires_grad_()
    dpo_losses(difference, 0.1).sum().backward()
    # -beta sigmoid(-beta d): .1 x .2689414 and .1 x .7310586 (DPO, the gradient in section 4)
    assert difference.grad.tolist() == pytest.approx([-0.02689414, -0.07310586], abs=1e-7)


def test_ipo_by_hand():
    # 1 / (2 x .1) = 5: (5 - 5)^2, (2 - 5)^2, (-1 - 5)^2
    assert ipo_losses(doubles(5.0, 2.0, -1.0), 0.1).tolist() == pytest.approx([0.0, 9.0, 36.0])


def test_gradients_against_finite_differences():
    difference = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dpo_losses(x, 0.7, 0.1), difference)
    assert torch.autograd.gradcheck(lambda x: ipo_losses(x, 0.7), difference)


def test_a_hopeless_pair_neither_overflows_nor_loses_its_gradient():
    difference = doubles(-1e6).requires_grad_()
    loss = dpo_losses(difference, 0.1)
    loss.sum().backward()
    assert loss.item() == pytest.approx(1e5)
    assert difference.grad.item() == pytest.approx(-0.1)


# ------------------------------------------------------------------------------------------------------- against TRL


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_loss_and_gradient_are_those_of_trl(load_sharp, sharp_folders, make_task, tmp_path, name, kind):
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
    task = make_task(ours, examples, before, beta=0.5, loss=kind)
    found, sums = task.loss([0, 1, 2])([0, 1, 2])
    found.backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert abs(float(found.detach()) - math.log(2)) > 0.02  # not the loss of a policy that is its reference
    assert float(sums["rewards/chosen"]) == pytest.approx(theirs._metrics["eval"]["rewards/chosen"][0], abs=1e-4)
    gradients = dict(policy.named_parameters())
    for parameter, weight in ours.backbone.model.named_parameters():
        bound = 1e-4 * max(1e-2, float(gradients[parameter].grad.abs().max()))
        torch.testing.assert_close(weight.grad, gradients[parameter].grad, atol=bound, rtol=1e-3, msg=parameter)
