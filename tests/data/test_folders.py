"""Parts of folders: subsets, splits, `configs` of a README, and the same rows in several forms."""

import json
import logging
import shutil
import tempfile
from pathlib import Path

import datasets
import pandas
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.data import Prompt, read_records
from align.data.sources import iter_rows
from tests.data.rows import error_of, lines, write_parquet


def prompts(source):
    return [row.row["prompt"] for row in iter_rows(source)]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        write_parquet(path, rows)
    elif path.suffix == ".csv":
        pandas.DataFrame(rows).to_csv(path, index=False)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_bytes(lines(rows))


def write_readme(folder, configs):
    metadata = yaml.safe_dump({"license": "mit", "configs": configs}, allow_unicode=True)
    (folder / "README.md").write_text(f"---\n{metadata}---\n# About\n", encoding="utf-8")


NAMES = st.sampled_from(["de", "fr", "harmless-base", "en_US", "v1.0", "Größe"])
SPLITS = st.sampled_from(["train", "validation", "test"])
ENDINGS = st.sampled_from([".jsonl", ".parquet", ".csv", ".json"])
PARTS = st.dictionaries(st.tuples(NAMES, SPLITS), ENDINGS, min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(PARTS, NAMES, SPLITS, st.booleans(), st.booleans())
def test_each_part_of_a_folder_is_read_alone(parts, subset, split, has_readme, below_data):
    """With and without a README: the rows of a subset and split, all of them and no others; else an error with the names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configs = {}
        for (of, part), ending in parts.items():
            path = folder / ("data" if below_data else ".") / of / f"{part}{ending}"
            write(path, [{"prompt": f"{of}/{part}/{number}", "id": str(number)} for number in range(2)])
            entry = {"split": part, "path": str(path.relative_to(folder))}
            configs.setdefault(of, []).append(entry)
        if has_readme:
            write_readme(folder, [{"config_name": of, "data_files": files} for of, files in configs.items()])
        source = f"{folder}[subset={subset}, split={split}]"
        if (subset, split) in parts:
            assert prompts(source) == [f"{subset}/{split}/{number}" for number in range(2)]
        else:
            with pytest.raises(UserError) as error:
                prompts(source)
            known = configs if subset not in configs else [part for of, part in parts if of == subset]
            assert "did you mean" in str(error.value) or all(name in str(error.value) for name in known)


def test_a_folder_without_a_named_subset_says_what_it_reads(tmp_path, caplog):
    for subset in ("de", "fr"):
        write(tmp_path / subset / "train.jsonl", [{"prompt": subset}])
    with caplog.at_level(logging.WARNING):
        assert prompts(tmp_path) == ["de", "fr"]
        assert prompts(tmp_path) == ["de", "fr"]
    (message,) = caplog.messages
    assert "de, fr" in message
    assert "[subset=NAME]" in message
    shutil.rmtree(tmp_path / "fr")
    caplog.clear()
    assert prompts(tmp_path) == ["de"]
    assert not caplog.messages


def test_folders_saved_by_datasets_are_subsets(tmp_path):
    for subset in ("de", "fr"):
        rows = datasets.Dataset.from_list([{"prompt": subset}])
        datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / subset)
    assert prompts(f"{tmp_path}[subset=fr, split=test]") == ["fr"]
    assert "de, fr" in error_of(tmp_path)
    assert "de, fr" in error_of(f"{tmp_path}[subset=it]")
    assert "no subset 'de'" in error_of(f"{tmp_path}/de[subset=de]")
    rows.save_to_disk(tmp_path / "plain")
    assert "no split 'test'" in error_of(f"{tmp_path}/plain[split=test]")


def test_a_split_that_no_file_names_is_refused(tmp_path):
    write(tmp_path / "rows.jsonl", [{"prompt": "one"}])
    assert prompts(f"{tmp_path}[split=train]") == ["one"]
    assert "the folder has train" in error_of(f"{tmp_path}[split=test]")
    assert read_records(tmp_path, Prompt, split="test")  # the default of a reader


def test_files_left_out_because_others_name_the_split(tmp_path, caplog):
    write(tmp_path / "train.jsonl", [{"prompt": "one"}])
    write(tmp_path / "extra.jsonl", [{"prompt": "two"}])
    write(tmp_path / "test.jsonl", [{"prompt": "three"}])
    with caplog.at_level(logging.WARNING):
        assert prompts(tmp_path) == ["one"]
    (message,) = caplog.messages
    assert "1 file" in message
    assert message.endswith(": extra.jsonl")


FORMS = st.lists(ENDINGS, min_size=1, max_size=3, unique=True)


@settings(max_examples=20, deadline=None)
@given(FORMS, st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), min_size=1), min_size=1, max_size=3),
       st.booleans())  # fmt: skip
def test_rows_in_several_forms_are_read_once(endings, texts, as_shards):
    rows = [{"prompt": f"a{text}", "id": str(number)} for number, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ending in endings:
            if as_shards and ending == ".parquet":
                for number, row in enumerate(rows):
                    write(folder / "data" / f"train-{number:05}-of-{len(rows):05}.parquet", [row])
            else:
                write(folder / f"train{ending}", rows)
        assert prompts(folder) == [row["prompt"] for row in rows]


def test_files_of_other_rows_are_all_read(tmp_path):
    for number, ending in enumerate((".jsonl", ".csv", ".parquet")):
        write(tmp_path / f"part{number}{ending}", [{"prompt": f"{number}", "id": "x"}])
    assert prompts(tmp_path) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("data_files", "expected"),
    [
        ("a.jsonl", ["a"]),
        (["a.jsonl", "more/b.csv"], ["a", "b"]),
        ("more/*", ["b"]),
        ("**", ["README"]),
        ([{"split": "train", "path": ["more/b.csv", "a.jsonl"]}, {"split": "test", "path": "c.jsonl"}], ["b", "a"]),
        ({"train": "a.jsonl", "test": "c.jsonl"}, ["a"]),
    ],
)
def test_the_files_that_a_readme_names(tmp_path, data_files, expected):
    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    write(tmp_path / "a.parquet", [{"prompt": "a"}])
    write(tmp_path / "more" / "b.csv", [{"prompt": "b"}])
    write(tmp_path / "c.jsonl", [{"prompt": "c"}])
    write_readme(tmp_path, [{"config_name": "default", "data_files": data_files}])
    if expected == ["README"]:
        assert "README.md: unknown file type" in error_of(tmp_path)
    else:
        assert prompts(tmp_path) == expected


def test_configs_of_a_readme(tmp_path):
    write(tmp_path / "de" / "train.jsonl", [{"prompt": "de"}])
    write(tmp_path / "fr" / "train.jsonl", [{"prompt": "fr"}])
    write_readme(tmp_path, [{"config_name": "de", "data_dir": "de"}, {"config_name": "fr", "data_dir": "fr"}])
    assert error_of(tmp_path) == f"{tmp_path}: contains the subsets de, fr; choose one: {tmp_path}[subset=de]"
    assert prompts(f"{tmp_path}[subset=fr]") == ["fr"]
    write_readme(
        tmp_path, [{"config_name": "de", "data_dir": "de"}, {"config_name": "fr", "data_dir": "fr", "default": True}]
    )
    assert prompts(tmp_path) == ["fr"]
    for missing in ("gone/*.jsonl", "/etc/*", "../*", "https://example.org/a.jsonl"):
        write_readme(tmp_path, [{"config_name": "default", "data_files": missing}])
        assert f"its README refers to {missing}" in error_of(tmp_path)
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    assert "README.md: invalid YAML" in error_of(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert prompts(f"{tmp_path}[subset=de]") == ["de"]


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in error_of(tmp_path)


def test_a_hub_data_set_of_several_subsets_names_them(monkeypatch, tmp_path):
    def load(name, split):
        raise ValueError(
            "Config name is missing.\nPlease pick one among the available configs: ['de', 'fr']\nExample of usage:"
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    said = error_of("some/name")
    assert "['de', 'fr']" in said
    assert said.endswith("some/name[subset=NAME]")


WORDS = st.text(st.characters(codec="ascii", categories=["Ll"]), min_size=4, max_size=12)


@settings(max_examples=30, deadline=None)
@given(WORDS)
def test_a_column_option_is_used_or_refused(field):
    """A field that no layout has would be read from its column and then ignored."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.jsonl"
        path.write_bytes(lines([{"prompt": "Hi", "completion": "Yo", "topic": "x"}]))
        said = error_of(f"{path}[{field}=topic]")
        assert f"'{field}'" in said


def test_column_options_that_are_used(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"prompt": "Hi", "completion": "Yo", "topic": "x"}]))
    assert read_records(f"{path}[category=topic]", Prompt)[0].category == "x"
    assert read_records(f"{path}[completion=topic]", Prompt)  # answers beside prompts are not read
    assert error_of(f"{path}[catgory=topic]").endswith("did you mean category?")
