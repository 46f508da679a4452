"""Convert conversations to token ids and back."""

from align.tokenization.base import Tokenization, encode_demonstration
from align.tokenization.pairs import PairTokenization
from align.tokenization.rendering import (
    NAMED_TEMPLATES,
    PLAIN_TEMPLATE,
    ConversationError,
    set_template_date,
    template_date,
)

__all__ = [
    "NAMED_TEMPLATES",
    "PLAIN_TEMPLATE",
    "ConversationError",
    "PairTokenization",
    "Tokenization",
    "encode_demonstration",
    "set_template_date",
    "template_date",
]
