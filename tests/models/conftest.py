"""Models of many architectures, and models with an adapter."""

import copy

import pytest


@pytest.fixture
def lora(load_sharp, tiny_name):
    """Each of the three sharpened tiny models in turn, with an adapter `policy` that is not at zero."""
    return load_sharp(tiny_name, lora_rank=4)


@pytest.fixture(scope="module")
def backbones(sharp_backbones, sharpen):
    """The three tiny models and those of `small_models`, sharpened, by their names: do not change them."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from align.models.backbone import wrap
    from tests.models.small_models import CONFIGS

    made = dict(sharp_backbones)
    for name, config in CONFIGS.items():
        auto = AutoModelForSeq2SeqLM if name == "bart" else AutoModelForCausalLM
        made[name] = wrap(sharpen(auto.from_config(copy.deepcopy(config))))
    return made
