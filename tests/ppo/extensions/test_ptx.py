import pytest
import torch

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.data.readers import Text, read_texts
from align.ppo import PPOTrainer
from align.ppo.extensions import OptimizerStep
from align.ppo.extensions.ptx import PtxExamples, PtxSettings
from align.ppo.rollout import plan_minibatch
from align.ppo.toy_rewards import share_of_e
from tests.files import metrics_of, write_rows
from tests.models.losses import experience_of, minibatch_loss, role_outputs
from tests.training.toy_modules import accumulate

TEXTS = [{"text": "One document."}, {"text": "Another, longer one! It has two sentences."}, {"text": "Three. Is it?"}]
WEIGHT = 27.8


@pytest.fixture
def texts(tmp_path):
    return write_rows(tmp_path / "texts.jsonl", TEXTS)


def gradients(trainer):
    found = {name: w.grad.clone() for name, w in trainer.engine.module.named_parameters() if w.grad is not None}
    trainer.engine.module.zero_grad()
    return found


def language_model_gradient(trainer, examples):
    """The gradient of the mean loss of all tokens, each document read alone in a row of its own."""
    count, total = sum(len(ids) for example in examples for ids in example.responses), 0.0
    for example in examples:
        for ids in example.responses:
            prompt, response = Padded.from_lists([example.prompt]), Padded.from_lists([ids])
            total = total - trainer.roles.language_model(prompt, response).sum() / count
    total.backward()
    return gradients(trainer)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-t5"])
def test_the_gradient_is_ppos_and_gamma_times_the_language_models(name, load_sharp, make_ppo, hand_rollout, texts):
    """Packed documents give the gradient of documents that are read alone: nothing is attended to across a border."""
    loaded = load_sharp(name)
    trainer = make_ppo(loaded, ptx=PtxSettings(data=texts, objective="lm", tokens=40), micro_batch_tokens=100)
    rows, key = list(range(len(hand_rollout))), (1, 0, 0)
    scores = torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0, -0.5])
    experience = experience_of(trainer, hand_rollout, scores, role_outputs(trainer, hand_rollout), 0.1)
    plan = plan_minibatch(hand_rollout, rows, loaded.backbone, 100, trainer.run.accelerator)
    loss = minibatch_loss(trainer, experience, rows)

    accumulate(trainer.engine, plan, loss)
    ppo = gradients(trainer)
    extension = trainer.extensions["ptx"]
    ptx = extension.examples
    examples = ptx.draw(len(rows), key)
    assert any(len(example.responses) > 1 for example in examples)
    lm = language_model_gradient(trainer, examples)
    accumulate(trainer.engine, plan, loss)
    update, epoch, minibatch = key
    extension.extra_loss(OptimizerStep(update=update, epoch=epoch, minibatch=minibatch, responses=len(rows), metrics={}))
    both = gradients(trainer)
    for name in both:
        expected = ppo.get(name, 0.0) + WEIGHT * lm.get(name, torch.zeros(()))
        assert torch.allclose(both[name], expected, rtol=1e-3, atol=1e-4 * float(both[name].abs().max())), name
    assert extension.flops([]) == pytest.approx(sum(map(ptx.flops, examples)))


def test_draws_repeat_by_their_key_and_differ_by_it(load_sharp, texts):
    loaded = load_sharp("tiny-t5")
    ptx = PtxExamples(PtxSettings(data=texts, objective="span_corruption", tokens=30), loaded, 512, seed=0)
    assert ptx.draw(5, (3, 0, 1)) == ptx.draw(5, (3, 0, 1))
    assert ptx.draw(5, (3, 0, 1)) != ptx.draw(5, (3, 0, 2))
    end = loaded.tokenization.tokenizer.eos_token_id
    for example in ptx.draw(5, (1,)):
        assert example.prompt[-1] == example.responses[0][-1] == end


@pytest.mark.parametrize(
    ("model", "objective"), [("tiny-llama", "lm"), ("tiny-t5", "span_corruption"), ("tiny-gpt2", "prefix")]
)
def test_a_run_learns_the_texts_and_counts_their_flops(model, objective, texts, make_config, tmp_path):
    shared = {"num_ppo_epochs": 1, "max_new_tokens": 4, "missing_eos_score": None, "learning_rate": 1e-2}
    shared |= {"lr_scheduler_type": "constant"}
    ptx = PtxSettings(data=texts, objective=objective, tokens=48, per_response=2)
    for config in (make_config("ptx", total_updates=12, ptx=ptx, **shared), make_config("none", **shared)):
        PPOTrainer(model, [share_of_e], ["Hi"], config).train()
    lines, (without,) = (metrics_of(tmp_path / name) for name in ("ptx", "none"))
    assert lines[-1]["loss/ptx"] < lines[0]["loss/ptx"] - 0.5
    assert lines[0]["flops"] > 3 * without["flops"]


def test_settings_and_data_that_do_not_fit_are_named(load_sharp, texts, tmp_path):
    loaded = load_sharp("tiny-llama")

    def make(**settings):
        return PtxExamples(PtxSettings(**{"data": texts, "objective": "span_corruption"} | settings), loaded, 512, seed=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loaded.tokenization.tokenizer), "get_vocab", lambda tokenizer: {"a": 0})
        with pytest.raises(UserError, match="the tokenizer"):
            make()
    long = tmp_path / "long.jsonl"
    long.write_text('{"text": "' + "x" * 5000 + '"}\n')
    with pytest.raises(UserError, match="do not fit the model's context"):
        make(data=str(long), tokens=4000)
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"txt": "lost"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"bad.jsonl:2: field 'text'"):
        list(read_texts(str(path)))
    assert list(read_texts(str(path), skip_bad_rows=True)) == [Text("fine")]
    with pytest.raises(UserError, match="no text;"):
        list(read_texts([{"txt": 1}], skip_bad_rows=True))
