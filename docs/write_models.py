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
HEAD = """# Supported models

This page lists the supported architectures and their roles. Tests use tiny models with the published structure and random
weights; published weights were loaded only for the built-in models. Every model passes these checks, with full fine-tuning
and with LoRA on every linear layer:

| check | content |
| --- | --- |
| hidden states | the states of a text agree within 1e-5: alone, in a batch, packed, token by token with a cache |
| causality | a later token does not change earlier states; the logits equal those of transformers |
| costs | FLOPs equal torch's count (only active experts are counted); the cache size is correct |
| stages | one update each of SFT, reward model and PPO, for one architecture per code path |
| export | transformers computes the same score from the saved folder of a decoder's reward model |
| ZeRO-3 | an update on two processes equals that of one (`tests/launch/test_every_stage.py`, float32, CPU) |

[1]: {registry}
"""
DECODER_HEAD = """
## Decoders

All decoders support SFT and can be a policy or a reward model. Several responses to a prompt can share one row with it.
Decoders can be trained as a [prefix language model](howto/own-model.md#a-prefix-language-model). vLLM receives weights with
the names, shapes and values of a plain checkpoint (`tests/sampling/test_served_weights.py`). The exceptions are:

- not supported as reward models, because transformers has no classifier: {unclassified}
- one row per response: {unpacked}
- not supported with `prefix_lm`: {causal}
- not in vLLM's [list][1]: {unlisted}

In models with LongRoPE (Phi-3.5, Phi-4-mini), a row longer than the original context changes the frequencies of every row in
its batch. A run prints a warning.

"""
ENCODER_DECODER_HEAD = """
## Encoder-decoders

The encoder processes a prompt once for all its responses. All models support SFT and can be a policy or a reward model.
Reward models are saved as a language model with a separate head, because the T5 classifier of transformers feeds the same
text to encoder and decoder. Switch ignores `expert_capacity`, because token-by-token sampling never drops a token. For UMT5,
transformers 5.23 scales the last states by the inverse square root of their size, even for weights that version 4 runs
without scaling; this package does the same. vLLM is not supported.

"""
ENCODER_HEAD = """
## Encoders

Encoders process prompt and response as a text pair with bidirectional attention. They can be a reward model, a rule model
(with the rule as the second text) or an attribute model (`--form heads`), but not a policy
([usage](howto/own-model.md#an-encoder-as-reward-model)).

"""
TAIL = """
## Checked on loading

| check | if it fails |
| --- | --- |
| the config is valid; weights are complete and finite | refused |
| the model has no unexpected weights, such as `v_head` | ignored with a warning |
| causality, padding, and agreement with the logits of transformers on a few tokens | refused |
| token-by-token and full-sequence computation agree; rows can be removed from the cache | refused |
| responses can share one forward pass of their prompt | separate rows, with a warning |
| dropout in modules, functions, layers and routers is 0 | set to 0 |
| with `gradient_checkpointing`, two passes in training mode are equal | refused |
| every token of the tokenizer has a row in the embedding matrix | refused |
| the tokenizer has an end token | refused |
| the chat template renders user and assistant turns | refused |
| the chat template renders every turn of a row, such as a system turn | the row is refused |
| an answer has the same token ids after a prompt as alone | the ids are taken from the rendered prompt and answer |
| the template does not contain the current date (`strftime_now`) | the date becomes a constant |
| the template renders the tokenizer's start token (decoders) or closing token (T5) | the saved template adds it |
| `generation_config.json` has no additional end token ids | these ids also end responses |
| an adapter of this type (biases, PiSSA, embeddings) can be trained further or merged | refused |
| the model has no LongRoPE | a warning states the row length above which the log-probs of all rows of a batch change |
| config, generation config, tokenizer and model card can be saved | refused before the first update |

## Unsupported models

These models are refused:

| model | reason |
| --- | --- |
| Mamba and other recurrent models | finished rows cannot be removed from their cache |
| GPT-1, RWKV | transformers does not implement a key-value cache for them |
| multimodal models (Gemma 3 from 4B) | their config contains several models; use the text model |
| an encoder-decoder whose config has no `decoder_start_token_id` | the start of a response is undefined |
| a classifier with several labels, as a reward model | the reward is undefined |
| a reward model that requires custom code, except ArmoRM (see below) | code from a model's folder is never run |

## Reward models from other libraries

- A classifier with one label uses its own tokenizer and chat template. The score is read at the last token of the turn.
- A decoder without a chat template receives the policy's token ids, or the text of `chat_template` if the vocabularies
  differ. Padding tokens are excluded from this comparison. Prompts given as token ids are passed as ids to every classifier
  with the policy's vocabulary.
- ArmoRM (`LlamaForRewardModelWithGating`) is computed as in its published code (`align/extras/armo_rm.py`).

The tests of these reward models use random weights.
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
