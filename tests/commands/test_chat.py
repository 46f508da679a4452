import io
import os
import pty
import re
import select
import signal
import sys
import time
from contextlib import suppress

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from align import cli
from align.commands import chat
from align.commands.chat import Speaker
from align.core.errors import UserError
from align.core.seeds import RngStream
from align.sampling.generation import SamplingParams, row_uniforms, sample
from tests.commands.words import words_of

GREEDY = {"temperature": 0, "max_new_tokens": 10, "dtype": "float32"}


def talk(monkeypatch, capsys, lines, *models, **settings):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    cli.main(["chat", *models, *words_of(**(GREEDY | settings))])
    return capsys.readouterr().out


def expected(model, *turns, system=""):
    """The greedy answers to these user turns, by the sampler of batches on the whole conversation."""
    loaded = Speaker(model, "float32").loaded
    messages = [{"role": "system", "content": system}] if system else []
    sampling, answers = SamplingParams(10, temperature=0), []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = loaded.tokenization.prompt_ids(tuple(messages))
        drawn = sample(loaded.backbone, [prompt], torch.zeros(1, 10), sampling, loaded.tokenization.end_ids)
        answers.append(loaded.tokenization.text(drawn.ids[0]))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-t5"])
def test_each_answer_reads_the_turns_before_it(sharp_folders, model, monkeypatch, capsys):
    folder = sharp_folders[model]
    text = talk(monkeypatch, capsys, ["Hi", "And you?", "/reset", "Hi"], folder)
    first, second = expected(folder, "Hi", "And you?")
    assert text == f"{first}\n{second}\n{first}\n"


def test_what_is_loaded_is_printed_before_it_is_loaded(monkeypatch, capsys):
    def load(name, *_, **__):
        raise UserError(f"printed before: {capsys.readouterr().err}")

    monkeypatch.setattr(chat, "load_frozen", load)
    with pytest.raises(SystemExit):
        cli.main(["chat", "some/model"])
    assert "printed before: loading some/model" in capsys.readouterr().err


def test_a_system_message_begins_a_new_conversation(sharp_folders, monkeypatch, capsys):
    folder = sharp_folders["tiny-llama"]
    text = talk(monkeypatch, capsys, ["Hi", "/system Be kind.", "Hi", "/system", "Hi"], folder)
    (plain,), (kind,) = expected(folder, "Hi"), expected(folder, "Hi", system="Be kind.")
    assert text == f"{plain}\n{kind}\n{plain}\n"
    assert talk(monkeypatch, capsys, ["Hi"], folder, system="Be kind.") == f"{kind}\n"


def test_two_models_answer_with_their_own_histories_and_are_scored(sharp_folders, tmp_path, monkeypatch, capsys):
    one, two = sharp_folders["tiny-llama"], sharp_folders["tiny-gpt2"]
    rows = zip(expected(one, "Hi", "So?"), expected(two, "Hi", "So?"), strict=True)
    answers = "".join(f"[{one}] {a}\n[{two}] {b}\n" for a, b in rows)
    assert talk(monkeypatch, capsys, ["Hi", "So?"], one, two) == answers
    (tmp_path / "r.jsonl").write_text('{"prompt": "a", "responses": ["yes", "no"], "ranks": [1, 2]}\n' * 4)
    words = words_of(model="tiny-gpt2", train_data=tmp_path / "r.jsonl", output_dir=tmp_path / "run", report_to="none")
    cli.main(["reward", *words, "--demonstrations", ""])
    capsys.readouterr()
    scored = talk(monkeypatch, capsys, ["Hi", "So?"], one, two, reward_model=tmp_path / "run")
    assert re.sub(r"\n\(reward -?\d+\.\d{3}\)\n", "\n", scored) == answers


def test_an_answer_has_the_reward_that_sample_prints(sharp_folders, tmp_path, monkeypatch, capsys):
    """The reward model has another vocabulary and no chat template: it reads texts in the template of the settings."""
    policy, folder = sharp_folders["tiny-llama"], tmp_path / "classifier"
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = None
    tokenizer.add_tokens(["moon"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"reward_model": folder, "chat_template": "raw"}
    said = talk(monkeypatch, capsys, ["Name a moon."], policy, **settings)
    cli.main(["sample", policy, *words_of(prompt="Name a moon.", **(GREEDY | settings))])
    (reward,) = re.findall(r"reward (-?\d+\.\d{3})", capsys.readouterr().out)
    assert f"(reward {reward})" in said
    plain = talk(monkeypatch, capsys, ["Name a moon."], policy, **settings | {"chat_template": "plain"})
    assert f"(reward {reward})" not in plain


def test_a_stream_has_the_tokens_of_a_batch(sharp_folders):
    speaker = Speaker(sharp_folders["tiny-gpt2"], "float32", seed=5)
    sampling = SamplingParams(30, temperature=0.8, top_k=50, top_p=0.9)
    answers = [list(speaker.answer([{"role": "user", "content": "Hi"}], sampling))[-1] for _ in range(2)]
    for number, answer in enumerate(answers):
        uniforms = row_uniforms(1, sampling, 5, RngStream.CHAT, number)
        drawn = sample(speaker.loaded.backbone, [answer.prompt_ids], uniforms, sampling, speaker.loaded.tokenization.end_ids)
        assert drawn.ids == [answer.ids]
        assert drawn.ended == [answer.ended]
    assert answers[0].ids != answers[1].ids


@pytest.mark.parametrize(
    ("lines", "settings", "line"),
    [
        (["x" * 1200, "Hi"], {}, "error: the conversation has 1"),
        (["/what", "Hi"], {}, "/reset starts a new conversation"),
    ],
)
def test_a_mistake_keeps_the_conversation(lines, settings, line, sharp_folders, monkeypatch, capsys):
    folder = sharp_folders["tiny-gpt2"]
    text = talk(monkeypatch, capsys, lines, folder, **settings)
    assert text.startswith(line)
    assert text.endswith(f"\n{expected(folder, 'Hi')[0]}\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["a", "b", "c"], "model is ['a', 'b', 'c'], but must be one or two models"),
        ([], "model is []"),
        (["tiny-gpt2", "--reward_model", "/nowhere"], "/nowhere: neither a reward model of this package"),
    ],
)
def test_wrong_settings_are_one_line(words, line, command_error):
    assert line in command_error(cli.main, ["chat", *words])


class RealTerminal:
    """`align chat` behind a pseudo-terminal."""

    def __init__(self, *words):
        self.text = ""
        self.process, self.master = pty.fork()  # without the imports of a new interpreter
        if not self.process:
            code = 1
            try:
                sys.stdin = os.fdopen(0, closefd=False)
                sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.environ["TERM"] = "dumb"
                cli.main(["chat", *words])
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)

    def wait_for(self, pattern, seconds=60):
        end = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            if time.monotonic() > end:
                raise TimeoutError(self.text)
            if not select.select([self.master], [], [], 1.0)[0]:
                continue
            try:
                self.text += os.read(self.master, 4096).decode(errors="replace")
            except OSError:
                break
        found = re.search(pattern, self.text)
        assert found, self.text
        self.text = self.text[found.end() :]
        return found.group()

    def exit_code(self):
        """The exit code of the process, which has to end within 20 seconds."""
        end = time.monotonic() + 20
        while not (found := os.waitpid(self.process, os.WNOHANG))[0]:
            assert time.monotonic() < end, self.text
            time.sleep(0.05)
        return os.waitstatus_to_exitcode(found[1])

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt(self, pattern):
        """Type Ctrl-C until it is answered: readline handles one that comes as it begins to read at the next key only."""
        end = time.monotonic() + 60
        while True:
            self.type("\x03")
            with suppress(TimeoutError):
                return self.wait_for(pattern, 3)
            assert time.monotonic() < end, self.text


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(sharp_folders):
    terminal = RealTerminal(sharp_folders["tiny-gpt2"], *words_of(temperature=0, max_new_tokens=900, dtype="float32"))
    try:
        terminal.wait_for(r"Ctrl-D exits\r\n> ")
        for _ in range(5):  # on a busy machine, an answer may end before Ctrl-C is typed
            terminal.type("Hi\n")
            terminal.wait_for(r"Hi\r\n.")  # the first characters of the answer
            if "stopped" in terminal.interrupt(r"\(stopped\)\r\n> |Ctrl-D exits\r\n> "):
                break
        else:
            pytest.fail("no answer was stopped")
        terminal.interrupt(r"Ctrl-D exits\r\n> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    finally:
        with suppress(ProcessLookupError):
            os.kill(terminal.process, signal.SIGKILL)
        os.close(terminal.master)
