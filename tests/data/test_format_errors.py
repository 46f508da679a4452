"""Rows that cannot be read: the error names the field, what is wrong with it, and what to do."""

import pytest

from align.core.errors import UserError
from align.data.formats import convert_row
from align.data.records import AttributeJudgment, Demonstration, Ranking, RuleJudgment

from .published import BINARIZED, DOLLY, HH, SHP, ULTRAFEEDBACK
from .rows import assistant, user

ERRORS = [
    (Ranking, {**HH, "rejected": "\n\nHuman: other\n\nAssistant: no"},
     "field 'rejected': differs from 'chosen' before its last turn; give both the same prompt, or remove the row"),
    (Ranking, {**HH, "rejected": None}, "field 'rejected': is missing; write the transcript"),
    (Ranking, {**HH, "rejected": HH["chosen"]}, "field 'rejected': is the same text as 'chosen'; remove the row"),
    (Ranking, {**HH, "chosen": "\n\nHuman: 1\n\nAssistant: 2\n\nHuman: 3\n\nAssistant: "},
     "field 'chosen': is empty; write the text, or remove the row"),
    (Ranking, {**HH, "chosen": "\n\nHuman: 1"}, "field 'chosen': ends with a user turn; end it with the response"),
    (Ranking, {"chosen": "yes", "rejected": "no"},
     "field 'chosen': is neither a transcript that begins with 'Human:' nor an answer to a 'prompt'; "
     "add the field prompt"),
    (Ranking, {"prompt": "Hi", "chosen": "yes"},
     "field 'rejected': is missing; a pair has prompt, chosen and rejected"),
    (Ranking, {"chosen": [assistant("yes")], "rejected": [assistant("no")]},
     "field 'prompt': is missing; write the text that both responses answer"),
    (Ranking, {**BINARIZED, "score_rejected": 8.0},
     "field 'score_rejected': equals score_chosen, so there is nothing to learn; remove the row"),
    (Ranking, {"prompt": "Hi", "chosen": [assistant("a"), user("b"), assistant("c")], "rejected": "no"},
     "field 'chosen': has 3 turns; give one assistant turn and put what precedes in prompt"),
    (Ranking, {"prompt": "Hi", "responses": ["a", "b"]},
     "field 'ranks': is missing; give one rank for each response, 1 for the best"),
    (Ranking, {**ULTRAFEEDBACK, "completions": [{"response": "a", "overall_score": "N/A"}]},
     "field 'completions[0].overall_score': is 'N/A'; give a number"),
    (Ranking, {**ULTRAFEEDBACK, "completions": ["a"]},
     "field 'completions[0]': is 'a'; write {response, overall_score, ...}"),
    (Ranking, {**SHP, "labels": 2}, "field 'labels': is 2; use 1 where A is preferred, 0 where B is"),
    (Ranking, {**SHP, "human_ref_B": None}, "field 'human_ref_B': must be text, not None; write it in quotes"),
    (Ranking, {"question": "Hi", "answers": ["a", "b"]}, "field 'answers[0]': is 'a'; write {text, pm_score}"),
    (Ranking, {"question": "Hi", "answers": [{"text": "a"}]}, "field 'answers[0].pm_score': is None; give a number"),
    (Ranking, {"question": "Hi", "answers": [{"text": "a", "score": 1}]},
     "field 'responses': is a list of 1; give from 2 to 9"),
    (Ranking, {"question": "Hi", "answers": {"text": ["a", "b"], "score": [1]}},
     "field 'answers': has columns of different lengths; give one entry for each answer"),
    (Demonstration, {"instruction": " ", "output": "x"},
     "field 'instruction': is empty; write the text, or remove the row"),
    (Demonstration, {**DOLLY, "response": ""}, "field 'response': is empty; write the text, or remove the row"),
    (Demonstration, {"message_id": "m", "parent_id": None, "text": "Hi"},
     "field 'parent_id': belongs to OpenAssistant's flat message list; use its .trees.jsonl.gz file"),
    (Demonstration, HH,
     "the row has the fields chosen, rejected, which is no known form of a demonstration; "
     "it looks like a ranking (HH-RLHF); use it where those are asked for"),
    (AttributeJudgment, {"prompt": "Hi", "response": "a", "attributes": {}},
     "field 'attributes': is empty; give at least one, or remove the row"),
    (AttributeJudgment, {"prompt": "Hi", "response": "a", "attributes": {"kind": "yes"}},
     "field 'attributes.kind': is 'yes'; use a finite number"),
    (RuleJudgment, {"text": "x", "label": None},
     "the row has the fields text, which is no known form of a rule judgment; "
     "use one of: prompt, response, rule, verdict"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "row", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors_name_the_field_of_the_row(kind, row, message):
    with pytest.raises(UserError) as caught:
        convert_row(row, kind)
    assert str(caught.value) == message
