"""Supervised fine-tuning on a list of Python dicts; any layout that files may have will do (docs: data formats).

python examples/own_data_in_memory.py [MODEL]
"""

import sys

from align.core.seeds import RngStream
from align.models.loading import load_whole
from align.runtime.distributed import compute_dtype
from align.sampling.generation import SamplingParams, row_uniforms, sample
from align.sft import SFTConfig, SFTTrainer

DEMONSTRATIONS = [
    {"prompt": "Name a moon of Mars.", "completion": "Phobos."},
    {"messages": [{"role": "user", "content": "Name a moon of Mars."}, {"role": "assistant", "content": "Phobos."}]},
    {"instruction": "Name a moon of Mars.", "input": "", "output": "Phobos."},  # as Alpaca has it
]


def main(model_name: str = "tiny-gpt2", output_dir: str = "runs/examples/own-data", epochs: int = 60) -> str:
    """Train and return the likeliest answer to the prompt."""
    config = SFTConfig(output_dir=output_dir, num_train_epochs=epochs, batch_size=3, learning_rate=3e-3, report_to=["none"])
    folder = SFTTrainer(model_name, DEMONSTRATIONS, config, validation_data=DEMONSTRATIONS).train()

    loaded = load_whole(str(folder), compute_dtype("auto"))
    prompt = loaded.tokenization.prompt_ids(({"role": "user", "content": "Name a moon of Mars."},))
    greedy = SamplingParams(max_new_tokens=16, temperature=0.0)
    uniforms = row_uniforms(1, greedy, 0, RngStream.SAMPLE_COMMAND)
    responses = sample(loaded.backbone, [prompt], uniforms, greedy, loaded.tokenization.end_ids)
    answer = loaded.tokenization.text(responses.ids[0])
    print(f"answer: {answer!r}; the model is in {folder}")
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:2])
