import logging
import subprocess
import sys
import warnings

from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from align.core.launch import quiet_libraries


def test_an_adapter_of_gpt2_prints_no_warning(monkeypatch):
    monkeypatch.setattr(logging.getLogger("DeepSpeed"), "filters", [])
    monkeypatch.setattr("threading.excepthook", None)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=8))
    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("always")
        quiet_libraries()
        get_peft_model(model, LoraConfig(r=1, target_modules=["c_attn"]))
        warnings.warn("any other warning", UserWarning, stacklevel=1)
    assert [str(each.message) for each in printed] == ["any other warning"]


def test_a_stage_that_is_started_as_a_module_prints_no_warning():
    done = subprocess.run([sys.executable, "-m", "align.sft.train", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage")
    assert done.stderr == ""
