"""A run leaves a model in memory as it was, but for its weights, however it ends."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from align.sft import SFTConfig, SFTTrainer
from align.training.engine import TrainEngine

ROWS = [{"prompt": f"Is {i} odd?", "completion": "Yes." if i % 2 else "Not at all."} for i in range(4)]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def state_of(model):
    """What a later use of the model depends on besides its weights."""
    modules = {
        name: (module.training, getattr(module, "gradient_checkpointing", None), *(len(getattr(module, h)) for h in HOOKS))
        for name, module in model.named_modules()
    }
    weights = {
        name: (weight.requires_grad, weight.dtype, len(weight._post_accumulate_grad_hooks or ()))
        for name, weight in model.named_parameters()
    }
    return modules, weights


def make(folder, dtype):
    auto = AutoModelForSeq2SeqLM if "t5" in folder else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)


def train(model, tokenizer, folder, recomputes, **changes):
    settings = {"batch_size": 2, "micro_batch_tokens": 64, "report_to": ["none"], "gradient_checkpointing": recomputes}
    config = SFTConfig(output_dir=str(folder), **(settings | changes))
    return SFTTrainer(model, ROWS, config, tokenizer=tokenizer)


def generated(model, tokenizer):
    inputs = tokenizer("Is 3", return_tensors="pt")
    return model.generate(**inputs, max_new_tokens=8, do_sample=False).tolist()


def fail(monkeypatch, error):
    """Let the second backward pass of a run end it."""
    calls, backward = [], TrainEngine.backward

    def broken(self, *given):
        calls.append(1)
        backward(self, *given)
        if len(calls) == 2:
            raise error

    monkeypatch.setattr(TrainEngine, "backward", broken)


@pytest.mark.parametrize("end", ["done", "unused", RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiny", ["tiny-gpt2", "tiny-t5"])
def test_a_model_is_as_before_after_every_end_of_a_run(sharp_folders, tmp_path, monkeypatch, tiny, dtype, recomputes, end):
    model, tokenizer = make(sharp_folders[tiny], dtype)
    before = state_of(model)
    trainer = train(model, tokenizer, tmp_path / "first", recomputes)
    if end == "done":
        folder = trainer.train()
        saved = type(model).from_pretrained(folder, dtype=dtype)
        assert generated(model, tokenizer) == generated(saved, tokenizer), "the saved folder is another model"
    elif end != "unused":
        with monkeypatch.context() as patch:
            fail(patch, end())
            with pytest.raises(end):
                trainer.train()
    assert state_of(model) == before
    model.zero_grad()
    inputs = tokenizer("Is 3", return_tensors="pt")
    model(**inputs, labels=inputs.input_ids).loss.backward()
    assert any(weight.grad is not None for weight in model.parameters()), "a later backward pass loses its gradients"


def test_gradients_of_an_interrupted_run_do_not_reach_the_next(sharp_folders, tmp_path, monkeypatch):
    norms = []
    for name in ("interrupted", "fresh"):
        model, tokenizer = make(sharp_folders["tiny-gpt2"], torch.float32)
        if name == "interrupted":
            trainer = train(model, tokenizer, tmp_path / "broken", False)
            with monkeypatch.context() as patch:
                fail(patch, RuntimeError())
                patch.setattr(TrainEngine, "step", lambda *_: {"grad_norm": 0.0})
                with pytest.raises(RuntimeError):
                    trainer.train()
        trainer = train(model, tokenizer, tmp_path / name, False, batch_size=4)
        step = TrainEngine.step
        with monkeypatch.context() as patch:
            patch.setattr(TrainEngine, "step", lambda self, n, step=step: norms.append(step(self, n)) or norms[-1])
            trainer.train()
    assert norms[0]["grad_norm"] == norms[len(norms) // 2]["grad_norm"]
