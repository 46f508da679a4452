"""What all tests share: a model cache for the session, sharpened tiny models, and skips that count as failures on demand.

Libraries are imported by the fixtures that need them: a test of plain functions starts at once.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.research_data import ABSENT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from align.models.backbone import Backbone
    from align.models.loading import LoadedModel
    from align.ppo.config import PPOConfig
    from align.ppo.records import Rollout
    from align.ppo.setup import PPOSetup
    from align.training.run import Run

pytest_plugins = ["tests.hub_stand_in", "tests.vllm_stand_in"]

ROOT = Path(__file__).resolve().parents[1]
TINY = ("tiny-gpt2", "tiny-llama", "tiny-t5")
# Tiny models are slower on many threads than on one, and tests start processes of their own. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _fail_if_skipped(report):
    """With ALIGN_NO_SKIP=1 a skipped test has failed, unless it needs data that may not be copied to the machine."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("ALIGN_NO_SKIP") == "1":
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        if ABSENT in str(reason):
            return report
        report.outcome, report.longrepr = "failed", f"skipped, but ALIGN_NO_SKIP=1 forbids it: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _fail_if_skipped((yield))


DEBIAN = "on Debian: sudo .ci/install_debian.sh"
REMEDIES = {
    "chromium": f"a browser; {DEBIAN}, elsewhere: .venv/bin/playwright install chromium-headless-shell",
    "postgresql": f"PostgreSQL; {DEBIAN}",
    "two machines": f"network namespaces (root on Linux, and the command ip); {DEBIAN}",
    "hadolint": "hadolint, which checks the Dockerfiles; it has no wheel for this machine",
    ABSENT: "research data, whose licenses do not allow a copy in the repository; set ALIGN_RESEARCH_DATA to its folder",
}
"""What skipped tests need and how to get it, by a part of the reason of the skip."""


def pytest_terminal_summary(terminalreporter, config):
    """Say what was not run, and how to run it."""
    reasons = [str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])]
    lines = []
    for part, remedy in REMEDIES.items():
        if count := sum(part in reason for reason in reasons):
            lines.append(f"{count} skipped, which need {remedy}")
    if others := sum(not any(part in reason for part in REMEDIES) for reason in reasons):
        lines.append(f"{others} skipped for other reasons, listed below")
    if "not slow" in config.getoption("markexpr"):
        lines.append("tests marked slow: make test-full runs them")
    if "not gpu" in config.getoption("markexpr"):
        lines.append("tests marked gpu: make gpu-test runs them on a machine with an NVIDIA GPU")
    terminalreporter.section("not run")
    for line in lines:
        terminalreporter.line(line)
    if "not slow" not in config.getoption("markexpr"):
        show_slowest_files(terminalreporter)


def show_slowest_files(terminalreporter, count=20):
    """Print the files that took longest, which LONGEST should begin with."""
    seconds = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if hasattr(report, "duration"):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("slowest files, in seconds")
    for file, duration in seconds.most_common(count):
        terminalreporter.line(f"{duration:6.0f}  {file}")


LONGEST = (
    *(
        "test_every_stage",
        "test_resume",
        "test_architectures",
        "test_encoder_stage",
        "test_browser_tasks",
        "test_checkpoints",
        "test_gradio_files",
        "test_two_processes",
    ),
    *("test_losses_in_batches", "test_browser_lead_work", "test_adapters", "test_accessibility", "test_stop"),
    *("test_browser_rank", "test_browser_labeler", "test_crash", "test_layers", "test_loop", "test_examples"),
    *(
        "test_checkpoints_of_two",
        "test_heartbeat",
        "test_limits",
        "test_sharded",
        "test_browser_lead",
    ),
)
"""Files that are tested first, or workers that share out whole files would wait for one of them at the end."""


def pytest_collection_modifyitems(config, items):
    if "not slow" not in config.getoption("markexpr"):
        dropped = [item for item in items if item.get_closest_marker("part")]
        items[:] = [item for item in items if not item.get_closest_marker("part")]
        config.hook.pytest_deselected(items=dropped)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Collecting garbage skips what imports made: every run of a stage collects, and would look through all of it."""
    if len(sys.modules) > _frozen["modules"]:
        gc.collect()
        gc.freeze()
        _frozen["modules"] = len(sys.modules) + 20  # a few more are not worth a look through all


_frozen = {"modules": 0}


def _cache_of_these_sources() -> Path:
    """A folder under build/ that is shared by all workers and by later runs, until what makes the built-in models changes.

    Its name is a digest of the code that makes them and of the libraries that write them: no test reads a stale model.
    """
    digest = hashlib.sha256()
    for source in sorted((ROOT / "align" / "model_registry").glob("*.py")):
        digest.update(source.read_bytes())
    for library in ("torch", "transformers", "tokenizers", "safetensors", "gguf"):
        digest.update(f"{library} {version(library)}".encode())
    return ROOT / "build" / "test-cache" / digest.hexdigest()[:16]


def _drop_unused_caches(current: Path) -> None:
    """Delete the caches of other sources that no run has used for a day; one holds 400 MB."""
    current.mkdir(parents=True, exist_ok=True)
    os.utime(current)
    for folder in current.parent.iterdir():
        if time.time() - folder.stat().st_mtime > 86_400:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def align_cache() -> Iterator[Path]:
    """The folder of $ALIGN_CACHE; unless the variable is set, one under build/ that every worker and every run shares.

    A test of how a model is made sets a cache of its own.
    """
    given = os.environ.get("ALIGN_CACHE")
    folder = Path(given) if given else _cache_of_these_sources()
    if not given:
        _drop_unused_caches(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALIGN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _files_wait_for_no_disk() -> Iterator[None]:
    """A killed process loses nothing that it wrote; only a power failure would, so tests do not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def _sharpen(model: PreTrainedModel, seed: int = 7) -> PreTrainedModel:
    """Draw the weights anew, so large that outputs are far from uniform and every bias and norm matters.

    Matrices have a standard deviation of 1.5 / sqrt(inputs), embeddings 0.4: logits spread over +-2 to 3, and float32
    keeps their errors near 1e-6. T5 does not divide attention scores by sqrt(d_kv); its query matrices do instead.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if name.endswith("Attention.q.weight"):
                weight.copy_(drawn * 1.5 / (weight.shape[-1] * model.config.d_kv) ** 0.5)
            elif weight.dim() < 2:
                weight.add_(0.1 * drawn)
            else:
                weight.copy_(drawn * (0.4 if weight is embeddings else 1.5 / weight.shape[-1] ** 0.5))
    return model.eval()


@pytest.fixture
def command_error(capsys) -> Callable[..., str]:
    """`command_error(cli.main, words)`: what a command writes to stderr that a user's mistake ends; without a traceback."""

    def run(command, *arguments, **named):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command(*arguments, **named)
        error = capsys.readouterr().err
        assert ended.value.code == 2
        assert "Traceback" not in error
        return error

    return run


@pytest.fixture(scope="session")
def sharpen() -> Callable[[PreTrainedModel], PreTrainedModel]:
    """Make a model's outputs far from uniform, in place; the same weights every time."""
    _quiet()
    return _sharpen


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # T5 warns at every load that its output matrix is its own


@pytest.fixture(scope="session")
def sharp_folders(align_cache, tmp_path_factory) -> dict[str, str]:
    """Folders of the three tiny models with sharpened float32 weights, by the tiny model's name."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    from align.model_registry.registry import resolve_model

    _quiet()
    root, folders = tmp_path_factory.mktemp("sharp"), {}
    for name in TINY:
        source = resolve_model(name)
        auto = AutoModelForSeq2SeqLM if name == "tiny-t5" else AutoModelForCausalLM
        _sharpen(auto.from_pretrained(source, dtype=torch.float32)).save_pretrained(root / name)
        AutoTokenizer.from_pretrained(source).save_pretrained(root / name)
        folders[name] = str(root / name)
    return folders


CHROMIUM = (Path("/usr/bin/chromium-headless-shell"), Path("/usr/bin/chromium"))
"""The old headless shell, or the full browser, which takes half as much time again for the same tests."""
CHROMIUM_ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium, Debian's or Playwright's; one per process, because Playwright cannot start twice in one."""
    from playwright.sync_api import Error, expect, sync_playwright

    program = next((path for path in CHROMIUM if path.exists()), None)
    expect.set_options(timeout=60_000)  # a loaded machine takes its time
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=program, args=CHROMIUM_ARGUMENTS)
        except Error:
            if program is not None:
                raise
            pytest.skip("chromium is not installed")
        yield browser
        browser.close()


@pytest.fixture(params=TINY)
def tiny_name(request) -> str:
    """Each of the three tiny models in turn."""
    return request.param


@pytest.fixture(scope="session")
def load_sharp(sharp_folders) -> Callable[..., LoadedModel]:
    """`load_sharp("tiny-gpt2", adapter="policy", lora_r=4)`: a fresh sharpened model, in float32.

    An adapter starts with random weights, not with none, unless `fresh_adapter` says so.
    """

    import torch

    from align.core.settings import ModelConfig
    from align.models.backbone import kinds
    from align.models.loading import load

    verify, verified = kinds.verify, {}

    def verify_once(key: tuple) -> Callable[[Backbone], bool]:
        """The check of a newly loaded model, whose result is that of the first time."""

        def check(backbone: Backbone) -> bool:
            if key not in verified:
                verified[key] = verify(backbone)
            return verified[key]

        return check

    def load_one(
        name: str, adapter: str = "policy", fresh_adapter: bool = False, prefix_lm: bool = False, **settings
    ) -> LoadedModel:
        config = ModelConfig(model=sharp_folders[name], dtype="float32", **settings)
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kinds, "verify", verify_once((name, prefix_lm, *sorted(settings.items()))))
            loaded = load(config, torch.float32, adapter=adapter, prefix_lm=prefix_lm)
        if loaded.adapter and not fresh_adapter:
            for key, weight in loaded.backbone.model.named_parameters():
                if f"lora_B.{adapter}" in key:
                    torch.nn.init.normal_(weight, std=0.05)
        return loaded

    return load_one


@pytest.fixture(scope="session")
def sharp_backbones(load_sharp) -> dict[str, Backbone]:
    """The three sharpened backbones without adapters, shared by all tests: do not change them."""
    return {name: load_sharp(name).backbone for name in TINY}


@pytest.fixture
def backbone(sharp_backbones, tiny_name) -> Backbone:
    """Each of the three sharpened backbones in turn: do not change it."""
    return sharp_backbones[tiny_name]


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Run]:
    """`make_run(SFTConfig, "sft", prompt_loss_weight=0.5)`: a real run in a fresh folder, float32, without trackers."""
    from align.training.run import Run

    made = []

    def make(config_class, stage: str, **settings) -> Run:
        made.append(stage)
        folder = str(tmp_path / f"run-{len(made)}")
        return Run(config_class(output_dir=folder, dtype="float32", report_to=["none"], **settings), stage)

    return make


class HandPPO:
    """A PPO run around a model that is already loaded, without prompts and rewards: tests give it rollouts."""

    def __init__(self, config: PPOConfig, setup: PPOSetup) -> None:
        self.config, self.setup = config, setup
        self.run, self.loaded, self.engine, self.roles = setup.run, setup.policy, setup.engine, setup.roles
        self.extensions = {extension.name: extension for extension in setup.extensions}


@pytest.fixture
def make_ppo(make_run) -> Callable[..., HandPPO]:
    """`make_ppo(loaded, critic="separate")`: PPO with its reference around a model."""

    from align.models.backbone import flops_profile
    from align.ppo.actor_critic import build_actor_critic
    from align.ppo.config import PPOConfig
    from align.ppo.extensions import TrainingContext
    from align.ppo.extensions.discovery import configured_extensions
    from align.ppo.flops import RoleFlopsProfiles
    from align.ppo.rewards import MissingEos, Rewards
    from align.ppo.setup import PPOSetup, build_engine_and_roles
    from align.sampling.engines import TransformersEngine
    from align.sampling.generation import SamplingParams

    def make(loaded: LoadedModel, reward_adapter=None, **settings) -> HandPPO:
        run = make_run(PPOConfig, "ppo", **({"num_ppo_epochs": 1, "total_updates": 1, "whiten_rewards": False} | settings))
        config, policy = run.config, flops_profile(loaded.backbone, loaded.adapter)
        extensions = configured_extensions(config)
        missing_eos = MissingEos(config.missing_eos_penalty, config.missing_eos_score)
        context = TrainingContext(
            run=run,
            policy=loaded,
            training_prompts=[],
            prompts=[],
            total_updates=config.total_updates,
            critic_warmup=config.critic_warmup,
            samples_per_prompt=config.samples_per_prompt,
            max_prompt_tokens=config.max_prompt_tokens,
            max_new_tokens=config.max_new_tokens,
            missing_eos=missing_eos,
        )
        for extension in extensions:
            extension.load(context)
        critic, adapters = config.critic if config.has_critic else "none", [reward_adapter] if reward_adapter else []
        module = build_actor_critic(loaded, critic, reward_adapter, adapters, config.ent_coef > 0)
        engine, roles = build_engine_and_roles(run, loaded, module, [], extensions, 1, [])
        for extension in extensions:
            extension.start(engine, roles)
        sampler, sampling = TransformersEngine(engine, loaded), SamplingParams(config.max_new_tokens)
        profiles = RoleFlopsProfiles(policy, flops_profile(loaded.backbone, None))
        setup = PPOSetup(
            run=run,
            policy=loaded,
            engine=engine,
            roles=roles,
            sampler=sampler,
            sampling=sampling,
            rewards=Rewards([]),
            missing_eos=missing_eos,
            prompts=[],
            validation=[],
            flops_profiles=profiles,
            extensions=extensions,
            card={},
        )
        return HandPPO(config, setup)

    return make


@pytest.fixture(scope="session")
def hand_rollout() -> Rollout:
    """Six responses of 1 to 9 tokens to prompts of 2 to 12 tokens, the bytes' ids of the tiny tokenizer."""
    import torch

    from align.ppo.records import Rollout
    from align.tokenization.encoded import EncodedPrompt

    generator = torch.Generator().manual_seed(11)
    sizes = ((2, 9), (12, 1), (5, 4), (5, 7), (8, 3), (3, 6))
    rows = [[torch.randint(8, 264, (count,), generator=generator).tolist() for count in pair] for pair in sizes]
    prompts = [EncodedPrompt(({"role": "user", "content": "x"},), prompt) for prompt, _ in rows]
    responses = [response for _, response in rows]
    return Rollout(prompts, responses, [True, True, False, True, False, True], [str(row) for row in range(6)])
