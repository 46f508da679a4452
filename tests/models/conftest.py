"""Models with an adapter, and data for the stages."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.files import write_rows
from tests.models.adapters import IDS


@pytest.fixture
def lora(load_sharp, tiny_name):
    """Each of the three sharpened tiny models in turn, with an adapter `policy` that is not at zero."""
    return load_sharp(tiny_name, lora_r=4)


@pytest.fixture
def stage_data(tmp_path):
    """Files of four demonstrations, pairs and prompts."""
    texts = ("Hi", "What is it?", "Tell me more", "Why?")
    rows = {
        "sft": [{"prompt": text, "completion": "Yes, it is."} for text in texts],
        "pairs": [{"prompt": text, "chosen": "Yes", "rejected": "No, no"} for text in texts],
        "prompts": [{"prompt": text} for text in texts],
    }
    return [write_rows(tmp_path / f"{name}.jsonl", each) for name, each in rows.items()]


@pytest.fixture
def make_adapter(sharp_folders, tmp_path):
    """Save an adapter with PEFT alone; returns its folder and the logits [1, 5, V] that PEFT computes with it."""

    def make(name, targets, **settings):
        auto = AutoModelForSeq2SeqLM if name == "tiny-t5" else AutoModelForCausalLM
        torch.manual_seed(1)
        settings.setdefault("init_lora_weights", False)
        lora = LoraConfig(r=2, lora_alpha=8, lora_dropout=0.5, target_modules=targets.split(","), **settings)
        theirs = get_peft_model(auto.from_pretrained(sharp_folders[name]), lora)
        for weight in theirs.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.2)
        folder = tmp_path / "adapter"
        theirs.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(sharp_folders[name]) / file, folder)
        if name == "tiny-t5":
            return str(folder), None
        base = auto.from_pretrained(sharp_folders[name])
        with torch.no_grad():
            bare = base(IDS).logits
            logits = PeftModel.from_pretrained(base, folder).eval()(IDS).logits
        assert (logits - bare).abs().max() > 0.5
        return str(folder), logits

    return make
