import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from align.batches.micro_batches import MicroBatch
from align.core.errors import UserError
from align.training.checkpoint.checkpoint import Checkpoint
from align.training.engine import NotFiniteError, TrainEngine
from align.training.optimizer import GradientReduction, ParamGroup, gradients_to_masters, make_master
from tests.training.toy_modules import Kept, Weights, accumulate, regression, step, vector


@pytest.mark.parametrize(
    ("betas", "second"),
    [
        # m = .9 x .2 + .1 x 1 = .28, corrected by 1 - .81: 1.4736842; v = .999 x .004 + .001 = .004996, corrected by
        # 1 - .998001: 2.4992496, its root 1.5809015; .9 - .1 x 1.4736842 / 1.5809015
        ((0.9, 0.999), 0.8067820),
        # m = .5 x 1 + .5 x 1 = 1, corrected by 1 - .25: 4/3; v = .75 x 1 + .25 = 1, corrected by 1 - .5625: 2.2857143, its
        # root 1.5118579; 1 - .1 - .1 x 1.3333333 / 1.5118579
        ((0.5, 0.75), 0.8118084),
    ],
)
def test_adamw_by_hand(toy_run, betas, second):
    engine = TrainEngine(toy_run(adam_beta1=betas[0], adam_beta2=betas[1]), Weights(vector(1.0)), 10)
    weight = engine.module.w[0]
    step(engine, vector(2.0), update=1)
    assert weight.item() == pytest.approx(0.9, abs=1e-7)  # the first step is rate x sign
    step(engine, vector(1.0), update=2)
    assert weight.item() == pytest.approx(second, abs=1e-6)


def test_groups_have_rates_of_their_own_and_one_rests(toy_run):
    module = Weights(vector(0.0), vector(0.0), vector(0.0))
    groups = [ParamGroup("value", frozenset({"w.1"}), 0.3), ParamGroup("late", frozenset({"w.2"}), 0.2, frozen_steps=1)]
    engine = TrainEngine(toy_run(), module, 10, groups)
    assert [group.weights for group in engine.groups] == [{"w.0"}, {"w.1"}, {"w.2"}]
    metrics = step(engine, *[vector(1.0)] * 3, update=1)
    rates = {"learning_rate": 0.1, "learning_rate/value": 0.3, "learning_rate/late": 0.0}
    assert {name: value for name, value in metrics.items() if name in rates} == rates
    assert [weight.item() for weight in module.w] == pytest.approx([-0.1, -0.3, 0.0], abs=1e-7)
    step(engine, *[vector(1.0)] * 3, update=2)
    # Of equal gradients each step is rate x sign: the moments of the resting weight followed them too.
    assert [weight.item() for weight in module.w] == pytest.approx([-0.2, -0.6, -0.2], abs=1e-6)


def test_weight_decay_is_decoupled_and_for_matrices_only(toy_run):
    engine = TrainEngine(toy_run(weight_decay=0.5), Weights(vector(1.0), vector(1.0)[None]), 10)
    step(engine, vector(0.0), vector(0.0)[None])
    assert engine.module.w[0].item() == 1.0
    assert engine.module.w[1].item() == pytest.approx(0.95, abs=1e-7)  # 1 - .1 x .5


def test_adafactor_by_hand(toy_run):
    engine = TrainEngine(toy_run(optimizer="adafactor"), Weights(vector(1.0)), 10)
    step(engine, vector(2.0), update=1)
    assert engine.module.w[0].item() == pytest.approx(0.9, abs=1e-6)  # decay 1 - 1^-.8 = 0: the step is rate x sign
    step(engine, vector(1.0), update=2)
    # Decay 1 - 2^-.8 = .4256508: v = .4256508 x 4 + .5743492 x 1 = 2.2769524, its root 1.5089574; .9 - .1 / 1.5089574
    assert engine.module.w[0].item() == pytest.approx(0.8337291, abs=1e-6)
    engine = TrainEngine(toy_run(optimizer="adafactor"), Weights(torch.zeros(2, 2)), 10)
    step(engine, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    # Mean squares of rows 2.5, 12.5 and of columns 5, 10, of all 7.5: v = rows x columns / 7.5 = 5/3, 10/3, 25/3, 50/3.
    # Steps 1 / sqrt(5/3) = .7745967, 2 / sqrt(10/3) = 1.0954451, 3 / sqrt(25/3) = 1.0392305, 4 / sqrt(50/3) = .9797959;
    # their root mean square sqrt(.96) is below 1, so none is scaled down.
    expected = [-0.07745967, -0.10954451, -0.10392305, -0.09797959]
    assert engine.module.w[0].flatten().tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        # Gradient (3, 4) of norm 5; with epsilon 1 the first AdamW step is rate x g / (|g| + 1).
        (1.0, [-0.1 * 0.6 / 1.6, -0.1 * 0.8 / 1.8]),
        (0.0, [-0.1 * 3 / 4, -0.1 * 4 / 5]),
        (10.0, [-0.1 * 3 / 4, -0.1 * 4 / 5]),
    ],
)
def test_clipping_by_the_global_norm(toy_run, limit, expected):
    engine = TrainEngine(toy_run(adam_epsilon=1.0, max_grad_norm=limit), Weights(vector(0.0), vector(0.0)), 10)
    metrics = step(engine, vector(3.0), vector(4.0))
    assert metrics == pytest.approx({"learning_rate": 0.1, "grad_norm": 5.0})
    assert [weight.item() for weight in engine.module.w] == pytest.approx(expected, abs=1e-6)


def test_the_schedule_sets_the_rate_of_each_update(toy_run):
    engine = TrainEngine(toy_run(lr_scheduler_type="linear", warmup_ratio=0.5), Weights(vector(0.0)), 4)
    rates = [step(engine, vector(1.0), update=update)["learning_rate"] for update in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05])
    assert engine.module.w[0].item() == pytest.approx(-sum(rates), abs=1e-6)  # each step is rate x sign


def test_only_what_requires_a_gradient_is_trained(toy_run):
    module = Weights(vector(1.0), vector(1.0))
    module.w[0].requires_grad_(False)
    engine = TrainEngine(toy_run(), module, 10)
    step(engine, vector(1.0), vector(1.0))
    assert [weight.item() for weight in module.w] == pytest.approx([1.0, 0.9])
    assert set(engine.masters) == {"w.1"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_of_the_weights_by_hand(toy_run, dtype):
    engine = TrainEngine(toy_run(), Weights(vector(1.0, dtype=dtype)), 10, average_decay=0.75)
    weight = engine.module.w[0]
    for update in (1, 2):
        step(engine, vector(1.0), update=update)
    assert engine.masters["w.0"].item() == pytest.approx(0.8, abs=1e-6)
    with engine.averaged_weights():
        # Steps of .1: .75 x 1 + .25 x .9 = .975; .75 x .975 + .25 x .8 = .93125
        assert weight.item() == pytest.approx(0.93125, abs=1e-6 if dtype is torch.float32 else 4e-3)
    assert weight.item() == pytest.approx(0.8, abs=1e-6 if dtype is torch.float32 else 4e-3)
    other = TrainEngine(toy_run("other"), Weights(vector(1.0, dtype=dtype)), 10, average_decay=0.75)
    other.load_state(*engine.state())
    for each in (engine, other):
        step(each, vector(1.0), update=3)
    assert torch.equal(other.average.values["w.0"], engine.average.values["w.0"])
    assert torch.equal(other.masters["w.0"], engine.masters["w.0"])


def test_small_updates_add_up_until_the_weight_moves(toy_run):
    engine = TrainEngine(toy_run(learning_rate=1e-4), Weights(vector(1.0, dtype=torch.bfloat16)), 1000)
    # Below 1 bfloat16 has steps of 2^-8 = .00391; the weight moves once the master is past half of that, .00195.
    for update in range(1, 31):
        step(engine, vector(1.0), update=update)
        assert engine.module.w[0].item() == (1.0 if update < 20 else 1.0 - 2**-8)


def test_gradients_add_up_in_float32(toy_run):
    engine = TrainEngine(toy_run(), Weights(vector(1.0, dtype=torch.bfloat16)), 10)
    sizes = [1.0] + [2.0**-9] * 4  # in bfloat16, 1 + 2^-9 is 1
    plan = [MicroBatch([[row]]) for row in range(5)]
    accumulate(engine, plan, lambda rows: (engine.module.w[0].sum() * sizes[rows[0]], {}))
    assert engine.masters["w.0"].grad.item() == 1.0 + 4 * 2.0**-9
    assert engine.module.w[0].grad is None, "the bfloat16 gradient is dropped as soon as it was added"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sizes", [[1] * 12, [5, 5, 2], [3, 9]])
def test_micro_batches_change_no_gradient_and_no_metric(toy_run, dtype, tolerance, sizes):
    found = []
    for name, cut in (("whole", [12]), ("cut", sizes)):
        module, loss = regression(dtype)
        engine = TrainEngine(toy_run(name), module, 10)
        bounds = [sum(cut[:i]) for i in range(len(cut) + 1)]
        plan = [MicroBatch([[row] for row in range(a, b)]) for a, b in pairwise(bounds)]
        if name == "cut":
            plan.append(MicroBatch([[0]], weight=0.0))  # a filler, which must not count
        sums = accumulate(engine, plan, loss)
        gradients = [master.grad.clone() for master in engine.masters.values()]
        found.append((sums, gradients, engine.step(1)["grad_norm"]))
    (one, gradients_one, norm_one), (two, gradients_two, norm_two) = found
    assert float(one["rows"]) == float(two["rows"]) == 12.0
    assert float(one["loss"]) == pytest.approx(float(two["loss"]), rel=max(tolerance, 1e-6))
    assert norm_one == pytest.approx(norm_two, rel=tolerance)
    for left, right in zip(gradients_one, gradients_two, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def test_two_losses_add_up_before_one_step(toy_run):
    engine = TrainEngine(toy_run(adam_epsilon=1.0), Weights(vector(0.0)), 10)
    weight = engine.module.w[0]
    first = accumulate(engine, [MicroBatch([[0]])], lambda rows: (2 * weight.sum() + 5, {}))
    second = accumulate(engine, [MicroBatch([[0]])], lambda rows: (weight.sum() + 7, {}))
    assert (float(first["loss"]), float(second["loss"])) == (5.0, 7.0)
    assert engine.step(1)["grad_norm"] == 3.0
    assert weight.item() == pytest.approx(-0.1 * 3 / 4, abs=1e-7)
    assert step(engine, vector(1.0), update=2)["grad_norm"] == 1.0, "gradients start from nothing again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_updates_nothing(toy_run, dtype, bad):
    engine = TrainEngine(toy_run(), Weights(vector(1.0, dtype=dtype)), 10)
    losses = [vector(1.0), vector(bad)]
    plan = [MicroBatch([[0]]), MicroBatch([[1]])]
    with pytest.raises(NotFiniteError, match="loss is not a finite number"):
        accumulate(engine, plan, lambda rows: (engine.module.w[0].float().sum() * losses[rows[0]].sum(), {}))
    assert engine.module.w[0].item() == engine.masters["w.0"].item() == 1.0


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_gradient_that_is_no_number_updates_nothing(toy_run, limit):
    engine = TrainEngine(toy_run(max_grad_norm=limit), Weights(vector(0.0), vector(1.0)), 10)

    def loss(_):  # the loss is sqrt(0) = 0, its slope there is infinite
        return engine.module.w[0].sqrt().sum() + engine.module.w[1].sum(), {}

    accumulate(engine, [MicroBatch([[0]])], loss)
    with pytest.raises(NotFiniteError, match="gradient is not a finite number"):
        engine.step(1)
    assert [weight.item() for weight in engine.module.w] == [0.0, 1.0]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone: a sum over it is the number itself."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("first", "second", "third", "unused")})


def loss_of(module: nn.ModuleDict, rows: torch.Tensor, *names: str) -> torch.Tensor:
    for name in names:
        rows = module[name](rows).tanh()
    return rows.square().sum()


def test_a_second_loss_adds_to_the_first_and_unused_weights_stay_without(group):
    module, plain = layers(), layers()
    weights = dict(module.named_parameters())
    reduction = GradientReduction(weights, bucket_bytes=4 * 16)
    assert reduction.buckets == [[3], [2], [1], [0]], "one weight each, the last first"
    rows = torch.arange(8.0).reshape(2, 4) / 8
    for names in (("first", "second"), ("second", "third")):
        reduction.begin()
        loss_of(module, rows, *names).backward()
        reduction.finish()
        loss_of(plain, rows, *names).backward()
    for name, weight in plain.named_parameters():
        if weight.grad is None:
            assert name == "unused.weight"
            assert weights[name].grad is None
        else:
            assert torch.equal(weights[name].grad, weight.grad), name


def test_gradients_of_bfloat16_weights_are_summed_in_their_masters(group):
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    master = make_master(weight)
    reduction = GradientReduction({"weight": master})
    reduction.begin()
    with gradients_to_masters({"weight": weight}, {"weight": master}):
        (weight * torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16)).sum().backward()
    reduction.finish()
    assert weight.grad is None
    assert master.grad.tolist() == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_resumed_engine_goes_on_to_the_bit(toy_run, dtype, optimizer):
    def go(engine, loss, first, last):
        for update in range(first, last + 1):
            accumulate(engine, [MicroBatch([[row] for row in range(update, 12)])], loss)
            engine.step(update)

    settled = {"optimizer": optimizer, "lr_scheduler_type": "cosine", "warmup_ratio": 0.3, "weight_decay": 0.1}
    module, loss = regression(dtype)
    through = TrainEngine(toy_run("through", **settled), module, 8)
    go(through, loss, 1, 8)

    module, loss = regression(dtype)
    run = toy_run("broken", **settled)
    broken = TrainEngine(run, module, 8)
    go(broken, loss, 1, 3)
    parts = {"kl": Kept({"beta": 0.1}), "best": Kept(math.inf)}
    Checkpoint(run, broken, parts).save(3)
    go(broken, loss, 4, 5)  # lost

    module, loss = regression(dtype)
    run = toy_run("broken", **settled, resume_from_checkpoint=True)
    resumed = TrainEngine(run, module, 8)
    restored = {"kl": Kept(), "best": Kept()}
    assert Checkpoint(run, resumed, restored).load() == 3
    assert {name: part.state for name, part in restored.items()} == {"kl": {"beta": 0.1}, "best": math.inf}
    go(resumed, loss, 4, 8)
    for name, weight in through.trainable.items():
        assert torch.equal(resumed.trainable[name], weight)
        assert torch.equal(resumed.masters[name], through.masters[name])
    tensors, numbers = through.state()
    again_tensors, again_numbers = resumed.state()
    assert numbers == again_numbers
    assert tensors.keys() == again_tensors.keys()
    assert all(torch.equal(tensor, again_tensors[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "other",
    [(vector(1.0),), 3 * (vector(1.0),), (vector(1.0), torch.zeros(3)), (torch.zeros(2), torch.zeros(1))],
    ids=["fewer", "more", "larger", "another shape"],
)
def test_the_state_of_other_weights_is_refused(toy_run, other):
    engine = TrainEngine(toy_run(), Weights(vector(1.0), vector(2.0)), 5)
    state = TrainEngine(toy_run("other"), Weights(*other), 5).state()
    with pytest.raises(UserError, match="another model or other settings"):
        engine.load_state(*state)
    assert [weight.item() for weight in engine.module.w] == [1.0, 2.0]
