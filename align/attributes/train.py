"""Attribute models from the command line: `accelerate launch align/attributes/train.py --config FILE`."""

from align.attributes import AttributeConfig, run_attribute_model
from align.core.launch import run_stage

if __name__ == "__main__":
    run_stage(AttributeConfig, run_attribute_model)
