"""A model's generation config: the ids that end a text, and the form in which it is saved."""

import copy
import re
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from align.core.errors import UserError, first_line, reason

_INVALID = re.compile(r"^- `(\w+)`:", re.MULTILINE)
"""A setting that `GenerationConfig.validate` reports as having no effect."""


def stored_generation_config(source: str) -> GenerationConfig | None:
    """The generation config in a folder or on the hub, or None if there is none.

    Raises:
        UserError: if the file cannot be read.
    """
    try:
        return GenerationConfig.from_pretrained(source)
    except Exception as error:  # a file from elsewhere can be wrong in any way
        path = Path(source) / GENERATION_CONFIG_NAME
        if isinstance(error, OSError) and not path.is_file():
            return None
        raise UserError(f"{path}: it cannot be read ({reason(error)})") from error


def end_ids(
    generation: GenerationConfig | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """The ids at which `transformers.generate` ends a text.

    Ids that transformers took over from a model's config may be the defaults of its class, which mean another token in
    this vocabulary. They count if they are special tokens.

    Raises:
        UserError: if they are not whole numbers.
    """
    given = config.get_text_config(decoder=True).eos_token_id if generation is None else generation.eos_token_id
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(id, int) for id in ids):
        raise UserError(f"{GENERATION_CONFIG_NAME}: eos_token_id must be an id or a list of ids, not {given!r}")
    if generation is None or generation._from_model_config:
        added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids = [id for id in ids if id in added or id in tokenizer.all_special_ids]
    return tuple(ids)


def valid_generation_config(generation: GenerationConfig) -> GenerationConfig:
    """A copy that transformers agrees to save, which it refuses after any change for settings without effect.

    Such settings, like a temperature without `do_sample`, are unset: `transformers.generate` ignores them.

    Raises:
        UserError: if it is invalid for another reason.
    """
    generation = copy.deepcopy(generation)
    try:
        generation.validate(strict=True)
    except ValueError as error:
        for name in _INVALID.findall(str(error)):
            setattr(generation, name, None)
    try:
        generation.validate(strict=True)
    except ValueError as error:
        raise UserError(f"{GENERATION_CONFIG_NAME}: it is invalid ({first_line(error)}); correct it") from error
    return generation
