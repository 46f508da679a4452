"""Vocabularies: rows of embedding matrices, the token ids that a tokenizer or another model knows, and padding."""

import copy
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from transformers import AddedToken, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from align.core.errors import UserError
from align.models.folders import has_vocabulary
from align.tokenization import Tokenization

MOST_UNUSED_ROWS = 1024
"""Models of one vocabulary round their rows up differently: Qwen 2.5 has 151,936 or 152,064, Pythia 50,304 to 50,688."""
_NO_UTF8 = ("ÿ", "<0xFF>")
"""Spellings of the byte 0xFF in vocabularies. UTF-8 has no such byte: no text yields the token."""


def vocabulary_rows(model: PreTrainedModel) -> int:
    """Return the number of rows of the embedding matrix."""
    embeddings: Any = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", model.config.get_text_config(decoder=True).vocab_size))


def require_vocabulary(model: PreTrainedModel, tokenization: Tokenization, name: str) -> None:
    """Raise a UserError if the embedding matrix lacks rows for some ids of the tokenizer.

    Special tokens that neither the template nor the tokenizer adds to text are exempt, such as the padding token or the
    image token of Gemma 3 1B. No tokenized text contains them.
    """
    rows = vocabulary_rows(model)
    beyond = {id: token for token, id in tokenization.tokenizer.get_vocab().items() if id >= rows}
    if not beyond:
        return
    missing = beyond.keys() - never_read(tokenization)
    if missing:
        first = min(missing)
        raise UserError(
            f"model '{name}': its embedding matrix has {rows} rows, but its tokenizer has {len(missing)} tokens beyond "
            f"them, {beyond[first]!r} (id {first}) for one; call model.resize_token_embeddings(len(tokenizer)) and save "
            "the model, or remove those tokens"
        )
    if tokenization.pad_id in beyond:
        tokenization.pad_id = tokenization.end_id


def require_vocabulary_of(policy: PreTrainedModel, tokenization: Tokenization, model: PreTrainedModel, role: str) -> None:
    """Raise a UserError if a model without a tokenizer assigns other tokens to the policy's ids.

    The tokenizer in the model's folder or hub cache gives most of its tokens; a tokenizer in memory may have other added
    tokens. If no vocabulary is stored there, only the number of rows is compared, because transformers would create an
    empty tokenizer. `role` is the name of the model in errors.
    """
    is_other = vocabulary_rows(model) > vocabulary_rows(policy) + MOST_UNUSED_ROWS
    with suppress(Exception):  # a folder from elsewhere can be wrong in any way
        source = model.config.name_or_path
        if source and has_vocabulary(source):
            stored = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
            names = {id: token for token, id in stored.get_vocab().items()}
            alike = [names[id] == token for token, id in tokenization.tokenizer.get_vocab().items() if id in names]
            is_other = is_other or 2 * sum(alike) <= len(alike)
    if is_other:
        raise UserError(
            f"{role}: {type(model).__name__} has another vocabulary than the policy, whose token ids it would read; give a "
            "model with the policy's tokenizer, or a reward model by align.reward.checkpoint.reward_of_classifier(model, "
            "tokenizer)"
        )


def require_rows(model: PreTrainedModel, needed: int, role: str) -> None:
    """Raise a UserError if a model has fewer rows than the policy's ids need. `role` is its name in errors."""
    rows = vocabulary_rows(model)
    if rows < needed:
        raise UserError(
            f"{role}: its embedding matrix has {rows} rows, but the policy can sample any id below {needed}; call "
            f"resize_token_embeddings({needed}) on the model"
        )


def rows_of_texts(tokenization: Tokenization, rows: int, prompts: Iterable[Iterable[int]] = ()) -> int:
    """Return the number of a policy's embedding rows that a reward model needs, which reads only the ids of text.

    No text contains an id without a token, or a special token that is never written, such as padding. If a policy samples
    such an id, it is removed for the reward model. TRL removes padding.

    Args:
        prompts: further token ids that need rows.
    """
    tokenizer = tokenization.tokenizer
    unread = never_read(tokenization)
    needed = {id for id in tokenizer.get_vocab().values() if id < rows and id not in unread}
    return 1 + max(needed.union(*prompts) - {tokenizer.pad_token_id} | tokenization.end_ids)


def never_read(tokenization: Tokenization) -> frozenset[int]:
    """Return the special tokens that neither the template nor the tokenizer adds to text."""
    return tokenization.chat.special_ids - tokenization.written_ids()


def with_unread_padding(tokenization: Tokenization, rows: int) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or a copy of it, with a padding token that never ends a text.

    A transformers classifier reads its score at the last token that is not padding. Candidates are the tokenizer's
    padding token, special tokens with "pad" in their names, the unknown token, other special tokens, and the byte 0xFF
    (GPT-2). If none fits, there is no padding token.

    Args:
        rows: number of rows of the embedding matrix, which must include the token.
    """
    tokenizer = tokenization.tokenizer
    vocabulary = tokenizer.get_vocab()
    pad, ends = tokenizer.pad_token_id, tokenization.end_ids
    if pad is not None and pad not in ends and pad < rows:
        return tokenizer
    special = {token: id for token, id in vocabulary.items() if id in tokenization.chat.special_ids}
    ordered = sorted(special, key=lambda token: ("pad" not in token.lower(), token != tokenizer.unk_token, special[token]))
    known = [token for token in (*ordered, *_NO_UTF8) if token in vocabulary]
    fitting = [token for token in known if vocabulary[token] not in ends and vocabulary[token] < rows]
    tokenizer = copy.deepcopy(tokenizer)
    if not fitting:
        tokenizer.pad_token = None
        return tokenizer
    # A single word: a name that contains the letter keeps its tokens.
    is_byte = fitting[0] in _NO_UTF8
    token = AddedToken(fitting[0], single_word=True, normalized=False, special=True) if is_byte else fitting[0]
    tokenizer.add_special_tokens({"pad_token": token})
    return tokenizer
