"""Writes docs/models.md, the table of architectures, from the list that the tests run (tests/models/architectures.py)."""

import sys
from collections.abc import Iterable
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
`tests/models/test_architectures.py` and `tests/models/test_encoders.py` run. The models have the shape of the published ones
and random weights. No published weights were loaded, except those of the built-in models.

Every model on this page passed these checks, with all weights and with LoRA on every linear layer:

| check | content |
| --- | --- |
| reading | states of a text alone, in a batch, packed and step by step with a cache agree within 1e-5 |
| causality | a later token changes no earlier state; logits are the model's |
| costs | FLOPs equal torch's count (for experts, of those that a token uses); size of the cache |
| stages | an update of SFT, reward model and PPO with that reward model; for one architecture of each code path (`PATHS`) |
| export | a decoder's reward model has the score that transformers computes from its folder |
| ZeRO-3 | an update on two processes equals that of one (`tests/launch/test_every_stage.py`, float32, CPU) |

[1]: {registry}
"""
DECODER_HEAD = """
## Decoders

Each can be trained by SFT, as a policy and as a reward model, shares a prompt among responses in a row, and can be a [prefix
language model](howto/own-model.md#a-prefix-language-model). vLLM gets weights with the names, shapes and values of a plain
checkpoint (`tests/sampling/test_served_weights.py`). Exceptions:

- refused as reward model, because transformers has no classifier: {unclassified}
- a row for each response: {unpacked}
- refused with `prefix_lm`: {causal}
- not in vLLM's [list][1]: {unlisted}

Models with LongRoPE (Phi-3.5, Phi-4-mini) read every row of a batch with other frequencies if one row exceeds the original
context; a run prints a line about it.

"""
ENCODER_DECODER_HEAD = """
## Encoder-decoders

The encoder reads a prompt once for all of its responses. Each can be trained by SFT, as a policy and as a reward model,
which is saved as the language model with its head beside it, because transformers' T5 classifier reads one text with
both halves. Switch ignores `expert_capacity`: sampling reads token by token, where nothing is dropped. vLLM is refused.

"""
ENCODER_HEAD = """
## Encoders

Encoders read prompt and response as a pair in both directions. Each is a reward model, rule model, attribute model
(form heads) and a judge of answers, also for a policy with another tokenizer, and is refused as a policy. A rule model
reads prompt and response as the first text and the rule as the second. See [Use your own
model](howto/own-model.md#an-encoder-as-reward-model).

"""
TAIL = """
## Checked on loading

| check | if it fails |
| --- | --- |
| the config can be used; weights are complete and finite | refused |
| weights that the model has no place for, such as `v_head` | left out, with one line |
| causality, padding, and the model's own logits on a few tokens | refused |
| reading token by token equals reading at once; rows can leave the cache | refused |
| responses can share one reading of their prompt | separate rows, with one line |
| dropout in modules, functions, layers and routers | set to 0 |
| with `gradient_checkpointing`, two passes in training mode are equal | refused |
| the tokenizer has no token without a row in the embedding matrix | refused |
| the tokenizer has an end token | refused |
| the chat template writes the turns of user and assistant | refused |
| the chat template writes every turn of a row, such as a system turn | the row is refused |
| an answer has the same token ids behind a prompt as alone | it is cut from the rendering |
| the current date in a template (`strftime_now`) | becomes a constant |
| start token (decoders), closing token (T5) of a tokenizer | the saved template writes them |
| end ids of `generation_config.json` | end responses too |
| an adapter's kind (biases, PiSSA, embeddings) can be continued or merged | refused |
| LongRoPE | one line with the context that short rows keep |
| config, generation config, tokenizer and card can be saved | refused before the first update |

`tests/badly_behaved/` has a tiny model for each of these problems and runs every stage, export and evaluation over all.

## Refused

Other models are refused if they read padding, if their logits are not a plain function of the last state, if a later token
changes an earlier state, or if reading token by token gives other states than reading at once. Known to be refused:

| model | why |
| --- | --- |
| Mamba and other recurrent models | their cache cannot drop rows that ended |
| GPT-1, RWKV | transformers keeps no cache of keys and values for them |
| models of images or sound and text (Gemma 3 from 4B on) | a config of several models; use the text model in them |
| an encoder-decoder whose config has no `decoder_start_token_id` | the start of a response is undefined |
| a classifier with several labels, as a reward model | the reward is undefined |
| a reward model whose class comes with its weights | no code of a model's folder is run |

## Reward models from other libraries

- A classifier with one label is read with its tokenizer and chat template, to the last token of the turn.
- A decoder without a chat template reads the policy's token ids, else the text of `chat_template`.

Tests use random weights; no published reward model was available.
"""


def listed(architectures: Iterable[Architecture]) -> str:
    """Architectures as a list in Markdown."""
    return "".join(f"- {architecture.name}: {architecture.examples}\n" for architecture in architectures)


def names(architectures: Iterable[Architecture]) -> str:
    """Architectures in a sentence."""
    return "; ".join(architecture.name for architecture in architectures)


def page() -> str:
    """The whole page."""
    assert all(pair.packed and has_classifier(pair.name) for pair in ENCODER_DECODERS)
    decoders = DECODER_HEAD.format(
        unclassified=names(decoder for decoder in DECODERS if not has_classifier(decoder.name)),
        unpacked=names(decoder for decoder in DECODERS if not decoder.packed),
        causal=names(decoder for decoder in DECODERS if not decoder.prefix_lm),
        unlisted=names(decoder for decoder in DECODERS if not decoder.in_vllm),
    )
    encoders = "".join(f"- {EXAMPLES[name].replace(' | ', ': ')}\n" for name in CONFIGS)
    pairs = ENCODER_DECODER_HEAD + listed(ENCODER_DECODERS)
    return HEAD.format(registry=VLLM_REGISTRY) + decoders + listed(DECODERS) + pairs + ENCODER_HEAD + encoders + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
