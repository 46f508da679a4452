import inspect
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from align import cli
from align.core.errors import UserError
from align.core.launch import one_line_errors
from align.core.settings import setting_names
from align.ppo import PPOConfig, run_ppo
from align.ppo.extensions import EXTENSIONS, Extension, Extensions, configured_extensions
from tests.files import ROOT, metrics_of, read_rows, write_rows
from tests.settings import run_settings

RUN = """
import sys
from align.ppo import PPOConfig, run_ppo

run_ppo(PPOConfig(model="tiny-llama", prompts=sys.argv[1], output_dir=sys.argv[2], report_to="none", total_updates=1,
    rollout_batch_size=2, max_new_tokens=2, reward_functions="align.ppo.toy_rewards:share_of_e"))
print("imported", *(name for name in sys.modules if name.startswith(("align.ppo.extensions.", "align.extras"))))
"""


@pytest.fixture
def prompts(tmp_path):
    return write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}])


def test_an_extension_is_imported_where_it_is_configured(prompts, tmp_path, align_cache):
    words = [sys.executable, "-c", RUN, prompts, str(tmp_path / "run")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [line for line in done.stdout.splitlines() if line.startswith("imported")]
    assert found == ["imported align.ppo.extensions.rollout_files"], "every run records rollouts"


def test_the_loop_calls_extensions_at_four_marked_lines():
    """`prepare` and the lines that name the object are no calls of hooks."""
    lines = (ROOT / "align" / "ppo" / "train.py").read_text().splitlines()
    calls = [line for line in lines if re.search(r"\bextensions\.\w+\(", line)]
    assert calls == [line for line in lines if "  # extensions: " in line]
    assert len(calls) == 4


def test_the_page_lists_where_hooks_are_called():
    """Each method of `Extensions` is called at one place, and each hook is called once."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = re.search(r"^\| method of `Extensions`.*\n\| ---.*\n((?:\|.*\n)+)", page, re.M).group(1)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    methods = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    hooks = [name for row in rows for name in re.findall(r"`(\w+)`", row[1])]
    assert sorted(methods) == sorted(name for name, value in vars(Extensions).items() if inspect.isfunction(value))
    optional = {"has_state", "state_dict", "load_state_dict"}
    defined = {name for name, value in vars(Extension).items() if inspect.isfunction(value) or isinstance(value, property)}
    assert sorted(hooks) == sorted(defined - optional)
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

    def resume(self, update):
        self.calls.append(update)

    def transform_scores(self, scores, rollout, components):
        return scores * self.number + 1

    def token_rewards(self, rollout, old):
        return torch.full((2, 3), self.number)

    def token_weights(self, rollout, old):
        return torch.full((2, 3), self.number)

    def on_experience(self, update, experience):
        self.calls.append("experience")

    def extra_loss(self, step_key, count):
        return {f"loss/{self.name}": self.number * count}

    def flops(self, lengths):
        return self.number

    def metrics(self):
        return {self.name: self.number}

    def after_update(self, update, experience):
        self.calls.append("after")


def test_hooks_of_several_extensions_are_combined_and_those_of_none_add_nothing():
    both = Extensions([Fixed("a", 2.0), Fixed("b", 3.0)])
    old = SimpleNamespace(log_probs=torch.zeros(2, 3))
    scores, token_rewards, token_weights = both.training_signal(torch.tensor([1.0, 2.0]), None, old, {})
    assert scores.tolist() == [(2 + 1) * 3 + 1, (4 + 1) * 3 + 1]
    assert token_rewards.unique().item() == 2 + 3
    assert token_weights.unique().item() == 2 * 3
    assert both.extra_loss((1, 0, 0), 4) == {"loss/a": 8, "loss/b": 12}
    with both.learning(1, None, []) as learned:
        assert [each.calls for each in both] == [["experience"]] * 2
    assert learned == {"flops": 5.0, "a": 2.0, "b": 3.0}
    assert [each.calls for each in both] == [["experience", "after"]] * 2
    none, scores = Extensions(), torch.tensor([1.0])
    assert none.training_signal(scores, None, None, {}) == (scores, None, None)
    assert none.extra_loss((1, 0, 0), 4) == {}
    with none.learning(1, None, []) as learned:
        pass
    assert learned == {"flops": 0.0}
    assert list(none.updates(iter([1, 2]), 0)) == [1, 2]


def test_an_extension_is_resumed_once_and_may_end_the_updates():
    one = Fixed("a", 1.0, stops_after=3)
    seen = []
    for update in Extensions([one, Fixed("b", 1.0)]).updates(iter(range(5, 20)), 4):
        one.calls.append("update")
        seen.append(update)
    assert one.calls == [4, *["update"] * 3]
    assert seen == [5, 6, 7]


def test_each_extension_has_a_setting():
    assert [extension.name for extension in configured_extensions(vars(PPOConfig()))] == ["rollouts"]
    assert set(setting_names(PPOConfig)) >= EXTENSIONS.keys()
    config = PPOConfig(length_adjustment=0.5, samples_per_prompt=2, reference_refresh=3, ptx={"data": "texts.jsonl"})
    found = configured_extensions(vars(config))
    order = list(EXTENSIONS)
    assert order.index("rules") < order.index("length_adjustment"), "rules are part of the scores that are adjusted"
    assert [each.name for each in found] == ["length_adjustment", "ptx", "reference_refresh", "rollouts"]
    assert [each.name for each in found if each.has_state] == ["reference_refresh"]


class Counter(Extension):
    """Counts updates, as a user's own extension would."""

    def __init__(self):
        self.updates = 0

    def metrics(self):
        return {"counted": float(self.updates)}

    def token_rewards(self, rollout, old):
        assert old.log_probs.shape == old.ref_log_probs.shape
        return old.log_probs - old.ref_log_probs

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
    (named,) = re.findall(r"--extensions (\S+)", page)
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
    with pytest.raises(UserError, match=r"extension '.*:Rival': there is a reward 'share_of_e' already; give its own"):
        run_ppo(settings(prompts, tmp_path / "run", total_updates=1, extensions=f"{__name__}:Rival"))


class Failing(Extension):
    """Cannot change the scores."""

    def transform_scores(self, scores, rollout, components):
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
    def transform_scores(self, scores, rollout, components):
        self._fail("transform_scores")
        return scores

    def after_update(self, update, experience):
        self._fail("after_update")

    def evaluate(self):
        """Lacks an argument."""


LINE = next(
    number for number, line in enumerate(inspect.getsource(sys.modules[__name__]).splitlines(), 1) if "@ torch" in line
)


@pytest.mark.parametrize("hook", ["should_stop", "transform_scores", "after_update"])
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
    assert ("the rollout of update 1 is in" in printed) == (hook == "transform_scores")


def test_a_hook_with_other_arguments_is_named_and_its_traceback_can_be_shown(monkeypatch, capsys):
    monkeypatch.setenv("BROKEN_HOOK", "none")
    monkeypatch.setenv("ALIGN_TRACEBACK", "1")
    *_, own = configured_extensions(vars(PPOConfig(extensions=f"{__name__}:Broken")))
    with pytest.raises(SystemExit), one_line_errors():
        own.evaluate(None)
    printed = capsys.readouterr().err
    assert re.search(r"Broken': evaluate failed: TypeError: .*evaluate\(\) takes 1 .*\(.*test_extensions\.py:\d+\)", printed)
    assert printed.startswith("Traceback")


def test_the_loss_of_a_process_is_no_error_of_a_hook(monkeypatch):
    monkeypatch.setenv("BROKEN_HOOK", "none")
    *_, own = configured_extensions(vars(PPOConfig(extensions=f"{__name__}:Broken")))

    def lost(hook):
        raise RuntimeError("[gloo] Connection closed by peer")

    own._fail = lost
    with pytest.raises(RuntimeError, match="Connection closed"):
        own.after_update(1, None)


class Misspelled(Extension):
    """Would change nothing."""

    def transform_score(self, scores, rollout, components):
        return scores


class Fitting(Extension):
    """Has methods of its own beside the hooks."""

    def _scores(self):
        return 0

    def short_answers(self):
        return 0


def test_methods_beside_the_hooks_are_allowed():
    *_, own = configured_extensions(vars(PPOConfig(extensions=f"{__name__}:Fitting")))
    assert isinstance(own, Fitting)


class Returns(Extension):
    """Gives these values in place of scores, components and rewards."""

    name = "mine"

    def __init__(self, scores, component, reward):
        self.scores, self.component, self.reward = scores, component, reward

    def transform_scores(self, scores, rollout, components):
        components["x"] = self.component
        return self.scores

    def score(self, rollout):
        return {"y": self.reward}


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ((None, torch.ones(2)), r"transform_scores must be a tensor of shape \[2\], not NoneType"),
        ((torch.ones(1), torch.ones(2)), r"transform_scores must be a tensor of shape \[2\], not one of \[1\]"),
        ((torch.ones(2), 1.0), r"component 'x' must be a tensor of shape \[2\], not float"),
    ],
)
def test_what_has_not_the_shape_of_the_scores_is_refused(returned, says):
    with pytest.raises(UserError, match=f"^extension 'mine': {says}$"):
        Extensions([Returns(*returned, None)]).training_signal(torch.zeros(2), None, None, {})


def test_what_has_not_the_shape_of_the_tokens_is_refused():
    old = SimpleNamespace(log_probs=torch.zeros(3, 3))
    with pytest.raises(UserError, match=r"'a': token_rewards must be a tensor of shape \[3, 3\], not one of \[2, 3\]$"):
        Extensions([Fixed("a", 1.0)]).training_signal(torch.zeros(3), None, old, {})


def test_a_reward_that_has_not_a_number_for_each_response_is_refused():
    with pytest.raises(UserError, match=r"^extension 'mine': score 'y' must be a tensor of shape \[3\], not list$"):
        Extensions([Returns(None, None, [0.5] * 3)]).score([None] * 3, {})


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("no_such_module:X", "extension 'no_such_module:X': No module named 'no_such_module'; write module:Class"),
        ("collections:Counter", "extension 'collections:Counter': must be a subclass of align.ppo.extensions.Extension"),
        (f"{__name__}:settings", "settings': must be a subclass of align.ppo.extensions.Extension"),
        (f"{__name__}:Fixed", "Fixed': missing a required argument: 'name'; it is made without arguments"),
        (f"{__name__}:Misspelled", "has no hook transform_score; rename it to transform_scores, or to _transform_score if"),
    ],
)
def test_what_is_no_extension_is_named(named, says):
    with pytest.raises(UserError, match=re.escape(says)):
        configured_extensions(vars(PPOConfig(extensions=named)))
