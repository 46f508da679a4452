"""Writes docs/models.md, the table of architectures, from the list that the tests run (tests/models/architectures.py)."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.models.architectures import (  # noqa: E402
    DECODERS,
    ENCODER_DECODERS,
    VLLM_REGISTRY,
    Architecture,
    has_classifier,
)
from tests.models.encoders import CONFIGS, EXAMPLES  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
HEAD = """# Architectures

Which models can play which role. `docs/write_models.py` writes this page from the list of tiny random models that
`tests/models/test_architectures.py` and `tests/models/test_encoders.py` run, and a test fails where the page and the
list differ. The models of each row have the shape of the published ones and random weights; no published weights were
loaded, except those of the built-in models.

Each row went through, with all weights and with LoRA on every linear layer:

- **reading**: the states of a text are the same alone, in a batch, packed beside other responses to its prompt, and step
  by step with a cache, within 1e-5; a later token changes no earlier state; logits are the model's own;
- **costs**: FLOPs as torch counts them (of experts, those that a token goes through), and the numbers that the cache holds;
- **stages**: an update each of supervised fine-tuning, reward modeling and PPO with that reward model, with sampling; a
  decoder's reward model has the score that transformers computes from its folder.

*Packed* says whether several responses share one reading of their prompt in a row. Where it is "no" (positions by ALiBi,
a window counted in columns), each response is a row. Models with LongRoPE (Phi-3.5, Phi-4-mini) read every row of a batch
with other frequencies if one row exceeds the original context; a run prints a line about it. *Whole prompt* says whether
it can be a [prefix language model](howto/own-model.md#a-prefix-language-model) (`prefix_lm`), read alike in all these
ways; where it is "no", that is refused in a line.

*vLLM*: "by name" says that the weights are handed over under the names and shapes, and with the values, of a plain
checkpoint, with and without an adapter (`tests/sampling/test_served_weights.py`); "listed", that vLLM's own [list][1] (of
a version after 0.12, the newest that was at hand) has the model's class. vLLM itself was run with a
[Llama](clusters.md#sampling-by-vllm) alone. It samples from no encoder-decoder, which is refused in a line.

*ZeRO-3*: on two processes that share all weights, an update (of log-probs; of an encoder, of rewards) ends at the weights
of one process, and a frozen copy says what it says on one (`tests/launch/test_architectures_zero.py`, float32, on a
processor). Whole stages were run under it with Llama, GPT-2 and T5 alone.

[1]: {registry}
"""
DECODER_HEAD = """
## Decoders

| architecture | such as | SFT and policy | reward model | packed | whole prompt | ZeRO-3 | vLLM |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
ENCODER_DECODER_HEAD = """
## Encoder-decoders

The encoder reads a prompt once for all of its responses. A reward model is saved as the language model that it is, with
its head beside it: transformers' T5 classifier reads one text with both halves, which is another model. Of Switch, an
expert takes as many tokens of a row as are sent to it (`expert_capacity` is not applied): sampling reads token by token,
where nothing is ever dropped.

| architecture | such as | SFT and policy | reward model | packed | ZeRO-3 |
| --- | --- | --- | --- | --- | --- |
"""
ENCODER_HEAD = """
## Encoders

They read prompt and response as a pair in both directions: each is a reward model and a judge of answers, in PPO beside a
policy with another tokenizer too, and refused as a policy. Attribute models (`align attributes`, form heads) and rule
models (`align rules`), learned, saved, loaded and obeyed by a GPT-2 in PPO, are in
`tests/rules/test_judges_on_encoders.py`; a rule model reads prompt and response as the first text and the rule as the
second. See [Use your own model](howto/own-model.md#an-encoder-as-reward-model).

| architecture | such as | SFT and policy | reward model | attributes, rules | judge | ZeRO-3 |
| --- | --- | --- | --- | --- | --- | --- |
"""
TAIL = """
## Refused

What is not in the tables is tried on a few tokens when it is loaded, and refused in one line if it reads padding, if its
logits are not a plain function of its last state, if a later token changes an earlier state, or if a text that is read token
by token, as in sampling, has other states than one that is read at once. Known to be refused:

| model | why |
| --- | --- |
| an encoder as a policy | it reads text in both directions |
| Mamba and other recurrent models | their cache cannot drop rows that ended |
| GPT-1, RWKV | transformers keeps no cache of keys and values for them: sampling would forget the text |
| models of images or sound and text (Gemma 3 from 4B on) | a config of several models; the text model in them fits |
| an encoder-decoder whose config has no `decoder_start_token_id` | nothing says what a response begins after |
| a decoder of which transformers has no classifier, as a reward model | other libraries could not load what is saved |
| a classifier with several labels, as a reward model | nothing says which of them is the reward |
| a tokenizer with more tokens than the embedding matrix has rows | text with such a token could not be read |
| a model that transformers could not save again | a run would fail at its end |
| a reward model whose class comes with its weights | no code of a model's folder is run |

Settings in `generation_config.json` without effect (a temperature without `do_sample`, beam settings without beams) are
left out when a model is saved: transformers refuses to save them once anything else in the file has changed.

The model card and an adapter's config name the base by its id on the hub, for a built-in model that of the published model.
The card leaves a local base out. An adapter on a local base names its folder, which loads on this machine alone.

## Reward models from elsewhere

Any classifier of a decoder or an encoder with one label is read by its own tokenizer and chat template to the last token of
an answer's turn, as transformers reads it (`tests/models/test_reward_on_disk.py`, `tests/models/test_encoders.py`). A
decoder without a chat template reads the policy's token ids, or by `chat_template` if it has another vocabulary
(`tests/ppo/test_scoring_models.py`). So is
ArmoRM's form: a Llama whose gate weighs attributes by the prompt (`tests/reward/test_gated_reward.py`, against the published
code's arithmetic). All of it was tried on random weights: no published reward model could be had.
"""


def row(architecture: Architecture) -> str:
    """A line of the tables of decoders and encoder-decoders."""
    reward = "full, LoRA" if has_classifier(architecture.name) else "refused"
    cells = [architecture.name, architecture.examples, "full, LoRA", reward, yes(architecture.packed)]
    if architecture.config.is_encoder_decoder:
        return f"| {' | '.join([*cells, 'yes'])} |\n"
    served = "by name, listed" if architecture.in_vllm else "by name"
    return f"| {' | '.join([*cells, yes(architecture.prefix_lm), 'yes', served])} |\n"


def yes(is_so: bool) -> str:
    """A cell."""
    return "yes" if is_so else "no"


def page() -> str:
    """The whole page."""
    decoders, pairs = ("".join(map(row, rows)) for rows in (DECODERS, ENCODER_DECODERS))
    cells = "refused | full, LoRA | full, LoRA | frozen, full, LoRA | yes"
    encoders = "".join(f"| {EXAMPLES[name]} | {cells} |\n" for name in CONFIGS)
    head, pairs = HEAD.replace("{registry}", VLLM_REGISTRY), ENCODER_DECODER_HEAD + pairs
    return head + DECODER_HEAD + decoders + pairs + ENCODER_HEAD + encoders + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
