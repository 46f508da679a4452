"""Turns and rows for the tests of data: three prompts, and rows of published data sets with all their fields."""

import json

from align.data import Prompt, read_records
from tests.refusals import refusal


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


ROWS = [{"prompt": "one"}, {"prompt": "two", "id": "2"}, {"prompt": "drei ä\u2028b", "category": "c"}]
RECORDS = [Prompt.from_row(row) for row in ROWS]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")


def write_parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def error_of(source, kind=Prompt, **options):
    """The message of the refusal to read a source."""
    return refusal(read_records, str(source), kind, **options)


HI = (user("Hi"),)
DIALOGUE = (user("1"), assistant("2"), user("3"))
HH = {
    "chosen": "\n\nHuman: 1\n\nAssistant: 2\n\nHuman: 3\n\nAssistant: yes",
    "rejected": "\n\nHuman: 1\n\nAssistant: 2\n\nHuman: 3\n\nAssistant:  no ",
}
BINARIZED = {
    "prompt": "Hi",
    "prompt_id": "8f",
    "chosen": [user("Hi"), assistant("yes")],
    "rejected": [user("Hi"), assistant("no")],
    "messages": [user("Hi"), assistant("yes")],
    "score_chosen": 8.0,
    "score_rejected": 5.5,
}


def completion(model, response, overall, mean):
    rating = {"Rating": "N/A", "Rationale": "."}
    return {
        "model": model,
        "principle": "helpfulness",
        "custom_system_prompt": "Be of use.",
        "response": response,
        "critique": "Fine.",
        "annotations": {"honesty": rating, "helpfulness": {**rating, "Type": ["1"], "Rationale For Rating": "."}},
        "overall_score": overall,
        "fine-grained_score": mean,
    }


ULTRAFEEDBACK = {
    "source": "evol_instruct",
    "instruction": "Hi",
    "models": ["m1", "m2", "m3"],
    "completions": [completion("m1", "a", 9.0, 2.5), completion("m2", "b", 1.0, 4.75), completion("m3", "c", 7.0, 4.0)],
    "correct_answers": ["None"],
    "incorrect_answers": ["None"],
}
UNRATED = {**ULTRAFEEDBACK, "completions": [*ULTRAFEEDBACK["completions"][:2], completion("m3", "c", 7.0, float("nan"))]}
SHP = {
    "post_id": "qt3nxl",
    "domain": "askculinary_train",
    "upvote_ratio": 0.98,
    "history": "Hi",
    "c_root_id_A": "hkh25sc",
    "c_root_id_B": "hkh25lp",
    "created_at_utc_A": 1636822112,
    "created_at_utc_B": 1636822110,
    "score_A": 2,
    "score_B": 9,
    "human_ref_A": "a",
    "human_ref_B": "b",
    "labels": 0,
    "seconds_difference": 2.0,
    "score_ratio": 4.5,
}


def answer(text, pm_score, selected=False):
    who = {"author": "Ann", "author_id": 7, "author_profile": "https://example.org/users/7"}
    return {"answer_id": 35, **who, "pm_score": pm_score, "selected": selected, "text": text}


STACK = {
    "qid": 31,
    "question": "Hi",
    "answers": [answer("a", 1), answer("b", 5, True), answer("c", 1)],
    "date": "2016/03/24",
    "metadata": ["https://example.org/questions/31", "https://example.org", "https://example.org/users/9/"],
}
STACK_PAIR = {key: STACK[key] for key in ("qid", "question", "date", "metadata")}
ALPACA = {"instruction": "Sort.", "input": "b a", "output": "a b", "text": "Below is ..."}
DOLLY = {"instruction": "When?", "context": "", "response": "Now.", "category": "open_qa"}
