import json
import math
import multiprocessing
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from align.core.errors import UserError
from align.data.readers import read_records
from align.data.records import Ranking
from align.model_registry import registry, tiny
from align.reward.checkpoint import is_reward_model, load_reward_model
from align.reward.scoring import RewardModelScorer
from align.tokenization.encoded import SampledResponse

TINY = ("tiny-gpt2", "tiny-llama", "tiny-t5")
DIALOGUE = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi, wer bist du?\n"},
    {"role": "assistant", "content": "  A mödel 🤖"},
]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ALIGN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny_folders(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALIGN_CACHE", str(tmp_path_factory.mktemp("registry")))
        return {name: registry.resolve_model(name) for name in TINY}


def load(folder, **kwargs):
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    auto = AutoModelForSeq2SeqLM if architecture.startswith("T5") else AutoModelForCausalLM
    model = auto.from_pretrained(folder, **kwargs)
    assert type(model).__name__ == architecture
    return model.eval()


def leftovers(cache):
    """What lies in the cache besides lock files."""
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("name", ["gpt2", "google/flan-t5-small", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_hub_names_pass_unchanged(name, cache):
    assert registry.resolve_model(name) == name
    assert not cache.exists()


@pytest.mark.parametrize("marker", ["config.json", "adapter_config.json"])
def test_a_saved_folder_is_returned_as_it_is(tmp_path, marker):
    (tmp_path / marker).write_text("{}")
    assert registry.resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["", "/no/such/folder", "./outputs/sft", "~nobody-here/model", "a/b/c", "some name", "model.gguf"]
)
def test_what_is_no_model_and_no_hub_name_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="cannot read this GGUF file" if name.endswith(".gguf") else "not a local folder"):
        registry.resolve_model(name)
    with pytest.raises(UserError, match=r"neither config\.json nor adapter_config\.json"):
        registry.resolve_model(str(tmp_path))


def test_a_registered_name_wins_over_a_folder_of_the_same_name(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny-gpt2").mkdir()
    assert cache in registry.resolve_model("tiny-gpt2").parents
    with pytest.raises(UserError, match="neither"):
        registry.resolve_model("./tiny-gpt2")


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_starts_near_uniform_without_dropout(name, tiny_folders):
    model = load(tiny_folders[name])
    prompt, response = torch.arange(8, 40)[None], torch.arange(50, 90)[None]
    inputs = {"input_ids": prompt, "decoder_input_ids": response} if name == "tiny-t5" else {"input_ids": response}
    with torch.no_grad():
        log_probs = model(**inputs).logits.log_softmax(-1)
        trained = model.train()(**inputs).logits.log_softmax(-1)
    assert log_probs.shape == (1, 40, 264)
    # The mean of -log p over the vocabulary is log 264 for a uniform distribution and larger for any other.
    assert (-log_probs.mean()).item() == pytest.approx(math.log(264), abs=0.05)
    assert log_probs.std() > 0.05  # and yet not constant: a gradient flows
    torch.testing.assert_close(trained, log_probs)


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_and_tokenizer_agree_and_text_and_special_tokens_come_back(name, tiny_folders):
    config, tokenizer = load(tiny_folders[name]).config, AutoTokenizer.from_pretrained(tiny_folders[name])
    assert tokenizer.is_fast
    assert len(tokenizer) == config.vocab_size == 264
    assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3
    text = "  A <pad> 'b ' n't \t\r\n <eos>  \x00\x04 é ﬁ 你好 🤖‍ \u2028<bos>."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert [i for i in ids if i < len(tiny.SPECIAL_TOKENS)] == [tiny.PAD, tiny.EOS, tiny.BOS]
    assert tokenizer("x").input_ids[1:] == ([tiny.EOS] if name == "tiny-t5" else [])


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_is_the_same_bytes_on_every_build(name, tiny_folders, cache):
    torch.manual_seed(7)
    torch.rand(3)
    before = torch.get_rng_state()
    again = registry.resolve_model(name)
    assert torch.equal(torch.get_rng_state(), before), "building changed the caller's random state"
    files = sorted(path.name for path in again.iterdir())
    assert files == sorted(path.name for path in tiny_folders[name].iterdir())
    for file in files:
        assert (again / file).read_bytes() == (tiny_folders[name] / file).read_bytes(), file
    assert (again / "model.safetensors").stat().st_mode == (again / "config.json").stat().st_mode


def test_tiny_chat_template_text():
    tokenizer = tiny.byte_tokenizer()
    rendered = tokenizer.apply_chat_template(DIALOGUE, tokenize=False)
    assert rendered == "System: Be kind.\nUser: Hi, wer bist du?\n\nAssistant:   A mödel 🤖<eos>\n"
    prompt = tokenizer.apply_chat_template(DIALOGUE[1:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "User: Hi, wer bist du?\n\nAssistant: "
    with pytest.raises(Exception, match="unknown role: tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "4"}], tokenize=False)


def resolve_slowly(log, number):
    """Resolve a model in a process of its own; a build is counted, and so slow that the other processes arrive."""
    build = tiny.build

    def slow_build(*arguments):
        with log.open("a") as file:
            file.write("build\n")
        time.sleep(1)
        build(*arguments)

    with patch.object(tiny, "build", slow_build):
        log.with_name(f"ready-{number}").touch()
        while len(list(log.parent.glob("ready-*"))) < 3:
            time.sleep(0.01)
        log.with_name(f"folder-{number}").write_text(str(registry.resolve_model("tiny-llama")))


def test_three_processes_at_once_build_once(cache, tmp_path):
    log = tmp_path / "builds"
    fork = multiprocessing.get_context("fork")  # without the imports of three new interpreters
    processes = [fork.Process(target=resolve_slowly, args=(log, number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    folders = {path.read_text() for path in tmp_path.glob("folder-*")}
    assert folders == {str(cache / "models" / "tiny-llama-r1")}
    assert log.read_text() == "build\n"
    assert leftovers(cache) == ["tiny-llama-r1"]
    load(Path(folders.pop()))


def test_a_finished_model_is_not_built_again(cache, monkeypatch):
    folder = registry.resolve_model("tiny-gpt2")
    monkeypatch.setattr(tiny, "build", lambda *args: pytest.fail("built twice"))
    assert registry.resolve_model("tiny-gpt2") == folder


@pytest.mark.parametrize("mishap", [KeyboardInterrupt(), OSError(28, "No space left on device"), RuntimeError("bug")])
def test_a_failed_build_leaves_nothing_and_the_next_one_works(cache, monkeypatch, mishap):
    def fail_halfway(folder, work, architecture):
        (folder / "config.json").write_text("{}")
        raise mishap

    with monkeypatch.context() as patch:
        patch.setattr(tiny, "build", fail_halfway)
        with pytest.raises(UserError if isinstance(mishap, OSError) else type(mishap)) as caught:
            registry.resolve_model("tiny-gpt2")
    if isinstance(mishap, OSError):
        assert "No space left on device" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert leftovers(cache) == []
    load(registry.resolve_model("tiny-gpt2"))


def test_what_a_killed_process_left_is_cleared(cache):
    dead = cache / "models" / ".tiny-gpt2-r1-abc123"
    dead.mkdir(parents=True)
    (dead / "config.json").write_text("half")
    load(registry.resolve_model("tiny-gpt2"))
    assert leftovers(cache) == ["tiny-gpt2-r1"]


def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ALIGN_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"tiny-gpt2 in .*ALIGN_CACHE"):
        registry.resolve_model("tiny-gpt2")


def test_waiting_for_a_lock_ends(cache, monkeypatch):
    monkeypatch.setattr(registry, "LOCK_TIMEOUT_S", 0.2)
    lock = cache / "models" / ".tiny-gpt2-r1.lock"
    lock.parent.mkdir(parents=True)
    with registry.FileLock(lock), pytest.raises(UserError, match="waited 0 s for another process"):
        registry.resolve_model("tiny-gpt2")


@pytest.mark.slow
def test_it_agrees_with_blind_readers(align_cache):
    folder = registry.resolve_model("smollm2-135m-judge")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "smollm2-135m"
    assert is_reward_model("smollm2-135m-judge")
    reward = load_reward_model("smollm2-135m-judge", "float32")
    encode = reward.loaded.tokenization
    score = RewardModelScorer.from_loaded(reward, encode, Accelerator(cpu=True), 4096)
    rows = [
        row for row in read_records("data/comparisons_round1.jsonl", Ranking, skip_bad_rows=True) if len(set(row.ranks)) > 1
    ]
    read = [
        SampledResponse(row.prompt, encode.prompt_ids(row.prompt), encode.response_ids(text), text)
        for row in rows
        for text in row.responses
    ]
    rewards = iter(score(read))
    right = [(next(rewards) > next(rewards)) == (row.ranks[0] < row.ranks[1]) for row in rows]
    assert len(right) == 100
    assert sum(right) >= 66  # 73 where it was made; chance: 50, and 66 or more of 100 by chance once in 1,000 times
