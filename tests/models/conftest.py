"""Models of many architectures, and models with an adapter."""

import pytest


@pytest.fixture
def lora(load_sharp, tiny_name):
    """Each of the three sharpened tiny models in turn, with an adapter `policy` that is not at zero."""
    return load_sharp(tiny_name, lora_rank=4)
