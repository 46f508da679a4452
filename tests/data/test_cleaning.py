"""C4's rules, one by one."""

import functools
import sys

import pytest
from py3langid.langid import LanguageIdentifier

from align import cli
from align.core.errors import UserError
from align.data.cleaning import Cleaner, split_sentences
from tests.files import read_rows, write_rows

PAGE = "The first sentence is here. The second one follows.\nA third comes now! Is the fourth long? Then a fifth ends it."


def other(number):
    return "\n".join(f"Page {number} says thing number {line} of many." for line in range(6))


def clean(text, **rules):
    return Cleaner(**rules).clean(text)


@pytest.mark.parametrize(
    "line",
    [
        "Home | About | Contact",  # no end
        "And then there was more...",
        "Read on.",  # two words
        "Please enable JavaScript in this browser.",
        "",
    ],
)
def test_lines_that_go_and_lines_that_stay(line):
    assert clean(f"{PAGE}\n{line}\n{other(1)}") == f"{PAGE}\n{other(1)}"


@pytest.mark.parametrize("part", ["Lorem Ipsum dolor sit amet.", "function f() { return 1; }", "What a Badword that is."])
def test_pages_that_go(part):
    assert clean(f"{PAGE}\n{part}", bad_words=["badword"]) is None


def test_bad_words_are_whole_words_and_short_pages_go():
    assert clean(PAGE.replace("here", "badwords"), bad_words=["badword"]) is not None
    assert clean(PAGE.replace("here", "bad word"), bad_words=["bad word"]) is None
    assert clean("One line of five words. Another line of it.") is None


def test_three_sentences_that_occurred_before_are_taken_out_of_the_later_page():
    cleaner = Cleaner()
    shared = "This is said. It is said everywhere. Nobody reads it."
    first, second = (f"{other(number)}\n{shared}" for number in (1, 2))
    assert cleaner.clean(first) == first
    assert cleaner.clean(second) == other(2)
    assert cleaner.removed["repeated sentences"] == 3
    pair = f"{other(3)}\nThis is said. It is said everywhere."  # two in a row may come again
    assert cleaner.clean(pair) == pair
    assert cleaner.clean(first) is None  # nothing new is left of it


GERMAN = (
    "Der erste Satz steht hier. Der zweite folgt ihm.\nEin dritter kommt jetzt! Ist der vierte lang? Dann endet es hier."
)


@pytest.fixture(scope="module")
def one_model():
    """The model of languages, which takes seconds to read, is read once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageIdentifier, "from_model_file", functools.cache(LanguageIdentifier.from_model_file))
        yield


@pytest.mark.usefixtures("one_model")
def test_pages_in_another_language_go(monkeypatch):
    assert clean(PAGE, language="en") == PAGE
    assert clean(GERMAN, language="en") is None
    assert clean(GERMAN, language="de") == GERMAN
    assert clean(GERMAN) == GERMAN
    monkeypatch.setattr("align.data.cleaning.LANGUAGE_PROBABILITY", 1.0)
    cleaner = Cleaner(language="en")
    assert cleaner.clean(PAGE) is None
    assert cleaner.removed["pages in another language than en"] == 1


@pytest.mark.usefixtures("one_model")
def test_a_language_that_is_not_known_and_a_library_that_is_not_there(monkeypatch):
    with pytest.raises(UserError, match="--language: unknown language 'xx'"):
        clean(PAGE, language="xx")
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(UserError, match="install the extra clean in the clone: pip install"):
        clean(PAGE, language="en")


def test_sentences_end_behind_their_quotation_marks():
    assert split_sentences('He said "No way." Then he left! (Really?) Yes, at 3.5 miles.') == [
        'He said "No way."',
        "Then he left!",
        "(Really?)",
        "Yes, at 3.5 miles.",
    ]


def test_the_command_writes_what_is_left_and_says_why(tmp_path, capsys, command_error):
    source, target, words = tmp_path / "raw.jsonl", tmp_path / "clean.jsonl", tmp_path / "bad.txt"
    rows = [{"text": PAGE, "id": "a"}, {"text": f"{other(1)}\nmenu"}, {"text": "{}"}, {"text": f"Ugly words.\n{other(2)}"}]
    write_rows(source, rows)
    words.write_text("Ugly\n", encoding="utf-8")
    cli.main(["data", "clean", str(source), "--output", str(target), "--bad-words", str(words)])
    written = read_rows(target)
    assert written == [{"text": PAGE, "id": "a"}, {"text": other(1)}]
    said = capsys.readouterr().out
    assert "2 of 4 pages" in said
    assert "1 lines without end punctuation, 1 pages with a brace, 1 pages with a bad word" in said
    source.write_text('{"text": "Too short."}\n', encoding="utf-8")
    again = ["data", "clean", str(source), "--output", str(target)]
    assert "all 1 pages were removed" in command_error(cli.main, again)
    assert len(target.read_text(encoding="utf-8").splitlines()) == 2  # the file of before
