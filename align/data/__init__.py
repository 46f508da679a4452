"""Training data: record types, readers of native and published layouts, a writer and a checker."""

from align.data.check import check_data
from align.data.formats import FORMATS, KINDS, Format
from align.data.readers import read_records, write_records
from align.data.records import AttributeJudgment, Conversation, Demonstration, Message, Prompt, Ranking, Record, RuleJudgment

__all__ = [
    "FORMATS",
    "KINDS",
    "AttributeJudgment",
    "Conversation",
    "Demonstration",
    "Format",
    "Message",
    "Prompt",
    "Ranking",
    "Record",
    "RuleJudgment",
    "check_data",
    "read_records",
    "write_records",
]
