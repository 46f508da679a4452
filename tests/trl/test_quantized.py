"""Quantized policies as TRL's scripts load them, by TRL's own flags."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import ModelConfig, get_peft_config, get_quantization_config

FLAGS = {
    "4 bits": {"load_in_4bit": True, "use_bnb_nested_quant": True},
    "8 bits, float16": {"load_in_8bit": True, "dtype": "float16"},
}


@pytest.mark.parametrize("flags", FLAGS)
def test_quantized_models_train_an_adapter(flags, make_trainer, folder, capsys):
    model_args = ModelConfig(use_peft=True, lora_r=2, **FLAGS[flags])
    how = {"quantization_config": get_quantization_config(model_args)}
    how["dtype"] = getattr(torch, model_args.dtype or "float32") if flags != "4 bits" else torch.float32
    trainer = make_trainer(
        model=AutoModelForCausalLM.from_pretrained(folder, **how),
        ref_model=None,
        reward_model=AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **how),
        value_model=AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **how),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    first, *_, last = (row for row in trainer.state.log_history if "objective/kl" in row)
    assert first["objective/kl"] == pytest.approx(0, abs=1e-3), "the reference is the quantized base"
    assert last["val/ratio"] == pytest.approx(1, abs=0.05)
    trainer.save_model(trainer.args.output_dir)
    assert ("float16" in capsys.readouterr().err) == ("float16" in flags)
