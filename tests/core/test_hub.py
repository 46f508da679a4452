import time

import datasets
import pytest

from align.core.errors import UserError
from align.core.hub import require_hub
from align.data.sources import iter_rows
from align.model_registry.registry import fetch_model
from align.models.folders import load_config
from tests.ports import free_port


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """An address at which nothing answers, and an empty cache."""
    require_hub.cache_clear()
    url = f"http://127.0.0.1:{free_port()}"
    settings = {"ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": False}
    for name, value in settings.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    yield url
    require_hub.cache_clear()


@pytest.mark.parametrize("load", [load_config, fetch_model, lambda name: list(iter_rows(name))])
def test_an_unreachable_hub_is_an_error_at_once(no_hub, load, capsys):
    start = time.monotonic()
    with pytest.raises(UserError, match=rf"'some/name': not a local file or folder, and {no_hub} cannot be reached \("):
        load("some/name")
    assert time.monotonic() - start < 2
    assert capsys.readouterr().err == f"'some/name' is not a local file or folder, trying {no_hub}\n"


def test_a_path_a_cached_name_and_with_datasets_offline_a_data_set_ask_nothing(no_hub, tmp_path, monkeypatch, capsys):
    (tmp_path / "models--some--name").mkdir()
    require_hub("some/name", "model")
    require_hub(str(tmp_path), "model")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    require_hub("some/name", "dataset")
    assert capsys.readouterr().err == ""


class Prepared(datasets.GeneratorBasedBuilder):
    """A data set of one row."""

    def _info(self):
        return datasets.DatasetInfo(features=datasets.Features(prompt=datasets.Value("string")))

    def _split_generators(self, dl_manager):
        return [datasets.SplitGenerator("train")]

    def _generate_examples(self):
        yield 0, {"prompt": "Hi"}


def test_a_data_set_that_datasets_has_prepared_is_read_without_the_hub(no_hub, monkeypatch, capsys):
    cache = str(datasets.config.HF_DATASETS_CACHE)
    Prepared(cache, "my_name", repo_id="some/MyName", hash="1").download_and_prepare()
    require_hub("some/MyName", "dataset")
    assert "asking" not in capsys.readouterr().err
    with pytest.raises(UserError, match="model 'some/MyName': not a local file or folder"):
        require_hub("some/MyName", "model")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)  # datasets would ask for half a minute
    assert [row.row for row in iter_rows("some/MyName")] == [{"prompt": "Hi"}]
