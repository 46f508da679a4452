import errno
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from safetensors import SafetensorError

from align.core.errors import UserError
from align.core.files import new_folder, read_json, write_json, write_text
from tests.refusals import refusal


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def tree(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_new_folder_appears_whole_with_what_lies_deep_in_it(tmp_path):
    target = tmp_path / "deep" / "er" / "model"
    with new_folder(target) as folder:
        (folder / "a.txt").write_text("a")
        (folder / "sub").mkdir()
        (folder / "sub" / "b.txt").write_text("b")
        (folder / "a.txt").chmod(0o600)
        assert not target.exists()
        assert folder.parent == target.parent, "a rename must not cross file systems"
    assert tree(target) == {"a.txt": "a", "sub/b.txt": "b"}
    assert names(target.parent) == ["model"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o755, "others read it too"
    assert stat.S_IMODE((target / "a.txt").stat().st_mode) == 0o644


class BrokenError(Exception):
    """An error that is not about files."""


@pytest.mark.parametrize(
    ("raised", "expected", "word"),
    [
        (BrokenError("no"), BrokenError, "no"),
        (UserError("mine"), UserError, "mine"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (OSError(28, "No space left on device"), UserError, "model: cannot be written .No space left on device"),
        (SafetensorError("I/O error: No space left (os error 28)"), UserError, "model: cannot be written .*No space"),
        (SafetensorError("incomplete metadata"), SafetensorError, "incomplete metadata"),
    ],
)
def test_an_error_on_the_way_leaves_the_old_folder_and_nothing_else(tmp_path, raised, expected, word):
    target = tmp_path / "model"
    with new_folder(target) as folder:
        (folder / "a.txt").write_text("old")

    def fail():
        with new_folder(target) as folder:
            (folder / "a.txt").write_text("new")
            raise raised

    with pytest.raises(expected, match=word):
        fail()
    assert tree(target) == {"a.txt": "old"}
    assert names(tmp_path) == ["model"]


def test_a_process_that_dies_in_the_middle_leaves_the_old_folder(tmp_path):
    code = """
        import os
        from pathlib import Path
        from align.core.files import new_folder, write_text
        with new_folder(Path("model")) as folder:
            (folder / "weights").write_text("old")
        with new_folder(Path("model")) as folder:
            (folder / "weights").write_text("half")
            os._exit(9)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, timeout=300).returncode == 9
    assert tree(tmp_path / "model") == {"weights": "old"}
    leftover = tmp_path / ".model.replaced"  # of a death between the renames
    leftover.mkdir()
    (leftover / "weights").write_text("older")
    for text in ("new", "newer"):  # what dead processes left is in the way of none
        with new_folder(tmp_path / "model") as folder:
            (folder / "weights").write_text(text)
        assert tree(tmp_path / "model") == {"weights": text}
    assert not leftover.exists()


def test_a_failed_rename_puts_the_old_folder_back(tmp_path, monkeypatch):
    target = tmp_path / "model"
    with new_folder(target) as folder:
        (folder / "weights").write_text("old")
    rename = Path.rename

    def failing(self, to):
        if Path(to) == target and (self / "weights").read_text() == "new":
            raise OSError(5, "Input/output error")
        return rename(self, to)

    def write():
        with new_folder(target) as folder:
            (folder / "weights").write_text("new")

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(UserError, match="the old contents are unchanged"):
        write()
    assert tree(target) == {"weights": "old"}


@pytest.mark.parametrize("write", [lambda path: new_folder(path).__enter__(), lambda path: write_text(path, "x")])
def test_a_path_through_a_file_is_one_line(tmp_path, write):
    (tmp_path / "file").write_text("kept")
    assert "file/x/model: cannot be written" in refusal(write, tmp_path / "file" / "x" / "model")
    assert tree(tmp_path) == {"file": "kept"}


def test_write_text_makes_folders_replaces_and_leaves_nothing_beside(tmp_path):
    target = tmp_path / "a" / "b.txt"
    write_text(target, "one, rather long")
    write_text(target, "zwei – 2\n")
    assert target.read_bytes() == "zwei – 2\n".encode()
    assert names(target.parent) == ["b.txt"]


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "not valid JSON"), (b"{", "not valid JSON"), (b"\xff\xfe", "not valid JSON"), (None, "No such")],
)
def test_broken_json_names_its_file_in_one_line(tmp_path, content, why):
    write_json(tmp_path / "a.json", {"ü": [1, 0.5, None]})
    assert read_json(tmp_path / "a.json") == {"ü": [1, 0.5, None]}
    (tmp_path / "a.json").unlink()
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    assert refusal(read_json, tmp_path / "a.json").startswith(f"{tmp_path}/a.json: {why}")


def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch):
    """CIFS and some FUSE mounts refuse it after the folder has got its name; permissions are refused there too."""
    fsync = os.fsync

    def refusing(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    def refused(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fsync", refusing)
    monkeypatch.setattr(Path, "chmod", refused)
    for text in ("first", "second"):
        with new_folder(tmp_path / "model") as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "weights").write_text(text)
        write_text(tmp_path / "settings", text)
    assert tree(tmp_path) == {"model/deep/weights": "second", "settings": "second"}
    assert names(tmp_path) == ["model", "settings"]


def test_a_file_that_cannot_be_synced_is_an_error_and_the_old_one_stays(tmp_path, monkeypatch):
    def failing(_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    write_text(tmp_path / "a.txt", "old")
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(UserError, match="model: cannot be written"), new_folder(tmp_path / "model") as folder:
        (folder / "weights").write_text("x")
    assert refusal(write_text, tmp_path / "a.txt", "new").startswith(f"{tmp_path}/a.txt: cannot be written")
    assert tree(tmp_path) == {"a.txt": "old"}
    assert names(tmp_path) == ["a.txt"]
