import inspect
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from align import cli
from align.core.errors import UserError
from align.core.launch import one_line_errors
from align.ppo import PPOConfig, run_ppo
from align.ppo.extensions import Extension, OptimizerStep, TrainingSignal, discovery
from align.ppo.extensions.active import Extensions
from align.ppo.extensions.discovery import configured_extensions, extension_settings, installed_extensions
from align.ppo.reward_functions import WeightedFunction
from tests.files import ROOT, metrics_of, read_rows, write_rows
from tests.ppo.rewards import long
from tests.settings import run_settings

RUN = """
import sys
from align.ppo import PPOConfig, run_ppo

run_ppo(PPOConfig(model="tiny-llama", prompts=sys.argv[1], output_dir=sys.argv[2], report_to="none", total_updates=1,
    rollout_batch_size=2, max_new_tokens=2, reward_functions="align.ppo.toy_rewards:share_of_e"))
print("imported", *(name for name in sys.modules if name.startswith(("align.ppo.extensions.", "align.extras"))))
"""


FRAME = ("extension", "active", "discovery")
"""Files of the folder that are not extensions, in the order of their import."""


@pytest.fixture
def prompts(tmp_path):
    return write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}])


def test_an_extension_is_imported_where_it_is_configured(prompts, tmp_path, align_cache):
    words = [sys.executable, "-c", RUN, prompts, str(tmp_path / "run")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [line for line in done.stdout.splitlines() if line.startswith("imported")]
    assert found == [f"imported {' '.join(f'align.ppo.extensions.{name}' for name in FRAME)}"], "no extension is imported"


def test_the_loop_marks_the_calls_of_extensions():
    """`prepare` and the lines that name the object are no calls of hooks."""
    lines = (ROOT / "align" / "ppo" / "train.py").read_text().splitlines()
    calls = [line for line in lines if re.search(r"\bextensions\.\w+\(", line)]
    assert len(calls) == 4
    assert [line for line in calls if "  # extensions: " not in line] == []


def test_the_page_lists_where_hooks_are_called():
    """Each method of `Extensions` is called at one place, and each hook is listed once."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = re.search(r"^\| method of `Extensions`.*\n\| ---.*\n((?:\|.*\n)+)", page, re.M).group(1)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    methods = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    hooks = [name for row in rows for name in re.findall(r"`(\w+)`", row[1])]
    assert sorted(methods) == sorted(name for name, value in vars(Extensions).items() if inspect.isfunction(value))
    defined = {name for name, value in vars(Extension).items() if inspect.isfunction(value)}
    assert sorted(hooks) == sorted((defined | {"should_stop"}) - {"state_dict", "load_state_dict"})
    assert len(defined) == 11
    code = {path.name: path.read_text() for path in (ROOT / "align" / "ppo").glob("*.py")}
    calls = [name for text in code.values() for name in re.findall(r"\bextensions\.(\w+)\b", text) if name in methods]
    assert sorted(calls) == sorted(methods)


class Fixed(Extension):
    """Adds to scores and metrics, and records the calls of its hooks."""

    def __init__(self, name, number, stops_after=9):
        self.name, self.number, self.stops_after, self.calls = name, number, stops_after, []

    @property
    def should_stop(self):
        return len(self.calls) > self.stops_after

    def shape(self, signal, rollout, old):
        tokens = torch.full((2, 3), self.number)
        shaped = signal.add_token_rewards(tokens).multiply_token_weights(tokens)
        return replace(shaped, scores=signal.scores * self.number + 1)

    def extra_loss(self, step):
        return {f"loss/{self.name}": self.number * step.responses}

    def flops(self, lengths):
        return self.number

    def metrics(self):
        return {self.name: self.number}

    def after_update(self, update, experience):
        self.calls.append("after")


def signal_of(*scores):
    return TrainingSignal(torch.tensor(scores), {})


STEP = OptimizerStep(update=1, epoch=0, minibatch=0, responses=4, metrics={})


def test_hooks_of_several_extensions_are_combined_and_those_of_none_add_nothing():
    both = Extensions([Fixed("a", 2.0), Fixed("b", 3.0)])
    old = SimpleNamespace(log_probs=torch.zeros(2, 3))
    signal = both.shape(signal_of(1.0, 2.0), None, old)
    assert signal.scores.tolist() == [(2 + 1) * 3 + 1, (4 + 1) * 3 + 1]
    assert signal.token_rewards.unique().item() == 2 + 3
    assert signal.token_weights.unique().item() == 2 * 3
    assert both.extra_loss(STEP) == {"loss/a": 8, "loss/b": 12}
    assert (both.flops([]), both.metrics()) == (5.0, {"a": 2.0, "b": 3.0})
    both.after_update(1, None)
    assert [extension.calls for extension in both] == [["after"]] * 2
    none, signal = Extensions(), signal_of(1.0)
    assert none.shape(signal, None, old) is signal
    assert (none.extra_loss(STEP), none.flops([]), none.metrics()) == ({}, 0, {})
    assert list(none.until_stop(iter([1, 2]))) == [1, 2]


def test_an_extension_may_end_the_updates():
    one = Fixed("a", 1.0, stops_after=2)
    seen = []
    for update in Extensions([one, Fixed("b", 1.0)]).until_stop(iter(range(5, 20))):
        one.after_update(update, None)
        seen.append(update)
    assert seen == [5, 6, 7]


def test_each_extension_has_a_setting_and_an_entry_point():
    assert configured_extensions(PPOConfig()) == []
    switches = [name for name, _ in extension_settings(PPOConfig(), all_of_them=True)]
    assert set(switches) == {name for name, point in installed_extensions().items() if point.value.startswith("align.")}
    order = switches.index
    assert order("rules") < order("length_adjustment"), "rules are part of the scores that are adjusted"
    config = PPOConfig(length_adjustment=0.5, hold_length=0.1, samples_per_prompt=2, ptx={"data": "texts.jsonl"})
    extensions = configured_extensions(config)
    assert [extension.name for extension in extensions] == ["length_adjustment", "hold_length", "ptx"]
    assert [extension.name for extension in extensions if extension.has_state] == ["hold_length"]


def test_an_extension_that_is_not_installed_is_not_ignored(monkeypatch):
    monkeypatch.setattr(discovery, "installed_extensions", dict)
    with pytest.raises(UserError, match=r"^ptx: .*not installed"):
        configured_extensions(PPOConfig(ptx={"data": "texts.jsonl"}))


def test_what_selects_the_policy_reads_the_scores_that_all_others_changed():
    config = PPOConfig(selection={"reward_model": "own"}, extensions=f"{__name__}:Fitting")
    extensions = configured_extensions(config, selection=WeightedFunction("own", 1.0, long))
    assert [extension.name for extension in extensions] == [f"{__name__}:Fitting", "selection"]


class Counter(Extension):
    """Counts updates, as a user's own extension would."""

    def __init__(self):
        self.updates = 0

    def metrics(self):
        return {"counted": float(self.updates)}

    def shape(self, signal, rollout, old):
        return signal.add_token_rewards(old.log_probs - old.ref_log_probs)

    def after_update(self, update, experience):
        self.updates += 1

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]


def settings(prompts, folder, **more):
    config = run_settings(folder, model="tiny-llama", prompts=prompts)
    config |= {"rollout_batch_size": 2, "max_new_tokens": 2, "reward_functions": "align.ppo.toy_rewards:share_of_e"}
    return PPOConfig(**config | more)


def test_the_extension_of_the_page_changes_training_scores_alone(prompts, tmp_path, monkeypatch, align_cache):
    page = (ROOT / "docs" / "howto" / "own-extension.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.S).group(1).replace("> 40", "> 0")
    (tmp_path / "my_extensions.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    named, *_ = re.findall(r"--extensions (\S+)", page)
    own = {"extensions": named, "total_updates": 1, "kl_coef": 0.0, "missing_eos_score": None}
    run_ppo(settings(prompts, tmp_path / "run", **own))
    (row,) = metrics_of(tmp_path / "run")
    assert row["reward/too_long"] == 1.0
    assert row["reward/kl_penalized"] == pytest.approx(row["reward/mean"] - 0.5)
    names = {"objective/scores": "reward/mean", "objective/kl": "kl/k1", "objective/rlhf_reward": "reward/kl_penalized"}
    assert [row[trl_name] for trl_name in names] == [row[name] for name in names.values()]
    run_ppo(settings(prompts, tmp_path / "replaced", **own | {"missing_eos_score": -1.0}))
    (row,) = metrics_of(tmp_path / "replaced")
    assert row["response/eos_rate"] == 0
    assert row["reward/kl_penalized"] == -1.0, "the score of a truncated response replaces what extensions made of it"


def test_a_users_extension_keeps_its_state(prompts, tmp_path, align_cache, capsys):
    own = {"extensions": f"{__name__}:Counter", "save_steps": 1}
    run_ppo(settings(prompts, tmp_path / "run", total_updates=2, **own))
    run_ppo(settings(prompts, tmp_path / "run", total_updates=4, resume_from_checkpoint=True, **own))
    assert [row["counted"] for row in metrics_of(tmp_path / "run")] == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(UserError, match=r"holds the state of '.*:Counter', which these settings do not use"):
        run_ppo(settings(prompts, tmp_path / "run", total_updates=5, resume_from_checkpoint=True, save_steps=1))
    run_ppo(settings(prompts, tmp_path / "plain", total_updates=1, save_steps=1))
    run_ppo(settings(prompts, tmp_path / "plain", total_updates=2, resume_from_checkpoint=True, **own))
    assert f"has no state of '{__name__}:Counter', which starts from its initial state" in capsys.readouterr().err


class Rival(Extension):
    """Names its reward as that of a function."""

    def score(self, rollout):
        return {"share_of_e": rollout.lengths.float()}


def test_a_reward_of_an_extension_replaces_no_other(prompts, tmp_path, align_cache):
    with pytest.raises(UserError, match=r"extension '.*:Rival': reward 'share_of_e' already exists"):
        run_ppo(settings(prompts, tmp_path / "run", total_updates=1, extensions=f"{__name__}:Rival"))


class Failing(Extension):
    """Cannot change the scores."""

    def shape(self, signal, rollout, old):
        raise UserError("no table of scores")


def test_the_rollout_of_an_extension_that_fails_is_kept(prompts, tmp_path, align_cache):
    with pytest.raises(UserError, match=r"no table of scores; the rollout of update 1 is in .*unscored\.jsonl"):
        run_ppo(settings(prompts, tmp_path / "run", total_updates=1, extensions=f"{__name__}:Failing"))
    assert {row["prompt"][0]["content"] for row in read_rows(tmp_path / "run" / "unscored.jsonl")} == {"Hi"}


class Broken(Extension):
    """Has mistakes in its hooks."""

    def __init__(self):
        self.hook = os.environ["BROKEN_HOOK"]

    def _fail(self, hook):
        if self.hook == hook:
            torch.zeros(2) @ torch.zeros(3)  # fails below the user's line

    @property
    def should_stop(self):
        return self._fail("should_stop")

    @torch.no_grad()
    def shape(self, signal, rollout, old):
        self._fail("shape")
        return signal

    def after_update(self, update, experience):
        self._fail("after_update")

    def evaluate(self):
        """Lacks an argument."""


LINE = next(
    number for number, line in enumerate(inspect.getsource(sys.modules[__name__]).splitlines(), 1) if "@ torch" in line
)


@pytest.mark.parametrize("hook", ["should_stop", "shape", "after_update"])
def test_an_error_in_a_hook_is_one_line_with_the_users_own(hook, prompts, tmp_path, monkeypatch, align_cache, capsys):
    monkeypatch.setenv("BROKEN_HOOK", hook)
    words = [
        "ppo",
        "--model",
        "tiny-llama",
        "--prompts",
        prompts,
        "--output_dir",
        str(tmp_path / "run"),
        "--report_to",
        "none",
    ]
    words += ["--rollout_batch_size", "2", "--max_new_tokens", "2", "--reward_functions", "align.ppo.toy_rewards:share_of_e"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--extensions", f"{__name__}:Broken"])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    where = "" if hook == "should_stop" else f": {hook}"
    assert f"error: extension '{__name__}:Broken'{where} failed: RuntimeError: " in printed
    assert f" ({__file__}:{LINE})" in printed
    assert "Traceback" not in printed
    assert ("the rollout of update 1 is in" in printed) == (hook == "shape")


def test_a_hook_with_other_arguments_is_named_and_its_traceback_can_be_shown(monkeypatch, capsys):
    monkeypatch.setenv("BROKEN_HOOK", "none")
    monkeypatch.setenv("ALIGN_TRACEBACK", "1")
    *_, own = configured_extensions(PPOConfig(extensions=f"{__name__}:Broken"))
    with pytest.raises(SystemExit), one_line_errors():
        own.evaluate(None)
    printed = capsys.readouterr().err
    assert re.search(r"Broken': evaluate failed: TypeError: .*evaluate\(\) takes 1 .*\(.*test_extensions\.py:\d+\)", printed)
    assert printed.startswith("Traceback")


def test_the_loss_of_a_process_is_no_error_of_a_hook(monkeypatch):
    monkeypatch.setenv("BROKEN_HOOK", "none")
    *_, own = configured_extensions(PPOConfig(extensions=f"{__name__}:Broken"))

    def lost(hook):
        raise RuntimeError("[gloo] Connection closed by peer")

    own._fail = lost
    with pytest.raises(RuntimeError, match="Connection closed"):
        own.after_update(1, None)


class Misspelled(Extension):
    """Would change nothing."""

    def shapes(self, signal, rollout, old):
        return signal


class Old(Extension):
    """Has a hook of an earlier version."""

    def transform_scores(self, scores, rollout, components):
        return scores


class Fitting(Extension):
    """Has methods of its own beside the hooks."""

    def _scores(self):
        return 0

    def short_answers(self):
        return 0


def test_methods_beside_the_hooks_are_allowed():
    *_, own = configured_extensions(PPOConfig(extensions=f"{__name__}:Fitting"))
    assert isinstance(own, Fitting)


class Returns(Extension):
    """Returns these values as scores, component and reward."""

    name = "mine"

    def __init__(self, scores, component, reward):
        self.scores, self.component, self.reward = scores, component, reward

    def shape(self, signal, rollout, old):
        return replace(signal, scores=self.scores, components={"x": self.component})

    def score(self, rollout):
        return {"y": self.reward}


OLD = SimpleNamespace(log_probs=torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ((None, torch.ones(2)), r"scores must be a tensor of shape \[2\], not NoneType"),
        ((torch.ones(1), torch.ones(2)), r"scores must be a tensor of shape \[2\], not one of \[1\]"),
        ((torch.ones(2), 1.0), r"component 'x' must be a tensor of shape \[2\], not float"),
    ],
)
def test_what_has_not_the_shape_of_the_scores_is_refused(returned, says):
    with pytest.raises(UserError, match=f"^extension 'mine': {says}$"):
        Extensions([Returns(*returned, None)]).shape(signal_of(0.0, 0.0), None, OLD)


def test_what_has_not_the_shape_of_the_tokens_is_refused():
    old = SimpleNamespace(log_probs=torch.zeros(3, 3))
    with pytest.raises(UserError, match=r"'a': token_rewards must be a tensor of shape \[3, 3\], not one of \[2, 3\]$"):
        Extensions([Fixed("a", 1.0)]).shape(signal_of(0.0, 0.0, 0.0), None, old)


class Nothing(Extension):
    """Forgets to return the signal."""

    def shape(self, signal, rollout, old):
        signal.components["x"] = signal.scores


def test_a_shape_that_returns_nothing_is_refused():
    with pytest.raises(UserError, match="must return a TrainingSignal, not NoneType"):
        Extensions([Nothing()]).shape(signal_of(0.0, 0.0), None, OLD)


def test_a_reward_that_has_not_a_number_for_each_response_is_refused():
    with pytest.raises(UserError, match=r"^extension 'mine': score 'y' must be a tensor of shape \[3\], not list$"):
        Extensions([Returns(None, None, [0.5] * 3)]).score([None] * 3, {})


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("no_such_module:X", "extension 'no_such_module:X': No module named 'no_such_module'"),
        ("no_such_extension", "extension 'no_such_extension': No module named 'no_such_extension'"),
        ("collections:Counter", "extension 'collections:Counter': must be a subclass of align.ppo.extensions.Extension"),
        (f"{__name__}:settings", "settings': must be a subclass of align.ppo.extensions.Extension"),
        (f"{__name__}:Fixed", "Fixed': missing a required argument: 'name'"),
        (f"{__name__}:Misspelled", "there is no hook shapes; rename it to shape, or to _shapes"),
        (f"{__name__}:Old", "there is no hook transform_scores; rename it to shape, or to _transform_scores"),
    ],
)
def test_what_is_no_extension_is_named(named, says):
    with pytest.raises(UserError, match=re.escape(says)):
        configured_extensions(PPOConfig(extensions=named))
