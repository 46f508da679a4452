"""Files of a run's folder."""

from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.files import read_json_lines
from align.training.run_folder import RunFolder

ENDS_A_LINE_ELSEWHERE = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\n"
"""Characters at which `str.splitlines` cuts. Those above U+001F are written into JSON as they are."""
TEXTS = st.text(st.one_of(st.sampled_from(ENDS_A_LINE_ELSEWHERE), st.characters(codec="utf-8")), max_size=6)


@given(st.lists(st.lists(TEXTS, min_size=1, max_size=3), min_size=2, max_size=3))
@settings(max_examples=50, deadline=None)
def test_rows_of_earlier_updates_are_kept_whatever_their_texts_contain(tmp_path_factory, updates):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    expected = []
    for update, texts in enumerate(updates):
        folder.write_rows("samples", [{"response": text} for text in texts], update)
        expected += [{"update": update, "response": text} for text in texts]
    assert read_json_lines(folder.path / "samples.jsonl") == expected
    folder.write_rows("samples", [{"response": "again"}], 1)
    assert read_json_lines(folder.path / "samples.jsonl") == [
        *(row for row in expected if row["update"] == 0),
        {"update": 1, "response": "again"},
    ]
