"""An engine that is restored from a checkpoint goes on to the same bits; the state of other weights is refused."""

import math

import pytest
import torch

from align.batches.micro_batches import MicroBatch
from align.core.errors import UserError
from align.training.checkpoint import Checkpoint
from align.training.engine import TrainEngine
from tests.training.toy_modules import Kept, Weights, accumulate, regression, vector


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_resumed_engine_goes_on_to_the_bit(toy_run, dtype, optimizer):
    def go(engine, loss, first, last):
        for update in range(first, last + 1):
            accumulate(engine, [MicroBatch(list(range(update, 12)), 1.0)], loss)
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


def test_without_a_checkpoint_a_run_starts_from_nothing(toy_run):
    run = toy_run(resume_from_checkpoint=True)
    part = Kept()
    assert Checkpoint(run, TrainEngine(run, Weights(vector(1.0)), 5), {"part": part}).load() == 0
    assert part.state is None


def test_only_the_last_checkpoint_stays(toy_run):
    run = toy_run(save_total_limit=1)
    engine = TrainEngine(run, Weights(vector(1.0)), 5)
    for update in (1, 2, 10):
        Checkpoint(run, engine, {}).save(update)
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["update-000010"]


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
