import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from align.commands.sample import SampleConfig, run_sample
from align.core.errors import UserError
from align.core.seeds import RngStream
from align.data.readers import FewShotPrompt
from align.eval.answers import open_context, open_models, respond, sample_answers, short_names, weights_version
from align.eval.bias import BiasConfig
from align.eval.results import EvalConfig, subsample
from align.eval.store import fingerprint
from align.eval.toxicity import ToxicityConfig
from align.eval.winrate import WinrateConfig
from align.sampling.generation import SamplingParams, row_uniforms
from align.sampling.settings import FewShotConfig, InferenceConfig
from tests.files import read_rows, write_rows


def open_both(config, few_shot=None):
    found = open_models(config.models, open_context(config.output, config), few_shot)
    return {evaluated.name: evaluated for evaluated in found}


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["runs/demo/sft", "runs/demo/ppo/model"], ["sft", "ppo"]),
        (["/a/x/ppo/model", "/b/x/ppo"], ["a-x-ppo", "b-x-ppo"]),
        (["runs/a/ppo", "runs/b/ppo", "tiny-gpt2"], ["a-ppo", "b-ppo", "tiny-gpt2"]),
        (["me/it"], ["it"]),
        (["model"], ["model"]),
        (["ppo", "./ppo/model"], ["1-ppo", "2-ppo"]),
    ],
)
def test_short_names(models, names):
    assert short_names(models) == names


def test_a_limit_takes_items_from_all_over():
    assert subsample(list(range(10)), 4) == [0, 2, 5, 7]
    assert subsample(list(range(3)), 0) == subsample(list(range(3)), 9) == [0, 1, 2]


def test_models_are_opened_frozen_one_after_the_other(sharp_folders, tmp_path):
    run = tmp_path / "ppo"
    shutil.copytree(sharp_folders["tiny-gpt2"], run / "model")
    (run / "config.yaml").write_text("seed: 0\n")
    context, seen = open_context(str(tmp_path), InferenceConfig(dtype="float32")), {}
    for evaluated in open_models([str(run), sharp_folders["tiny-t5"]], context):
        seen[evaluated.name] = evaluated.fingerprint
        model = evaluated.loaded.backbone.model
        assert not model.training
        assert not any(weight.requires_grad for weight in model.parameters())
        sampling = SamplingParams(5)
        rows = [evaluated.loaded.tokenization.prompt_ids(({"role": "user", "content": text},)) for text in ("Hi", "Count.")]
        uniforms = row_uniforms(2, sampling, 1, RngStream.ROLLOUT)
        both = respond(evaluated, rows, uniforms, sampling)
        assert respond(evaluated, rows[1:], uniforms[1:], sampling) == both[1:]
    assert list(seen) == ["ppo", "tiny-t5"]
    assert len(set(seen.values())) == 2


def test_no_model_and_a_wrong_one():
    with pytest.raises(UserError, match="models is empty"):
        open_both(BiasConfig())
    with pytest.raises(UserError, match="nowhere"):
        open_both(BiasConfig(models=["tiny-gpt2", "./nowhere"]))
    with pytest.raises(UserError, match="few_shot"):  # a task without examples knows no such name
        open_both(BiasConfig(models=["tiny-llama+few_shot"]))
    with pytest.raises(UserError, match="without duplicates"):
        EvalConfig(models=["a", "a"])


def test_a_fingerprint_changes_with_the_weights_and_the_chat_template(sharp_folders, tmp_path, monkeypatch):
    shutil.copytree(sharp_folders["tiny-gpt2"], tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    before, content = fingerprint(str(tmp_path / "m")), weights.read_bytes()
    assert before == fingerprint(sharp_folders["tiny-gpt2"])
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    trained = fingerprint(str(tmp_path / "m"))
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages }}")
    assert len({before, trained, fingerprint(str(tmp_path / "m"))}) == 3
    monkeypatch.chdir(tmp_path)  # '' as a path is the current folder
    assert fingerprint("") == fingerprint("a/hub-name") == ""


def test_a_fingerprint_changes_with_a_matrix_in_the_middle_of_the_weights(tmp_path):
    """As an adapter on some matrices, merged into its base, changes them."""
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    matrices = {name: torch.zeros(400_000) for name in "abc"}
    save_file(matrices, weights)
    before = fingerprint(str(tmp_path))
    save_file(matrices | {"b": matrices["b"].index_fill(0, torch.tensor([7]), 1.0)}, weights)
    assert fingerprint(str(tmp_path)) != before


def test_the_version_of_an_adapter_changes_with_its_own_weights_and_with_those_of_its_base(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    (base / "config.json").write_text("{}")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    files = base / "model.safetensors", adapter / "adapter_model.safetensors"
    for file in files:
        save_file({"w": torch.zeros(9)}, file)
    versions = [weights_version(str(adapter))]
    assert versions[0] == weights_version(str(adapter))
    for file in files:
        save_file({"w": torch.ones(9)}, file)
        versions.append(weights_version(str(adapter)))
    assert len({*versions, fingerprint(str(adapter)), weights_version(str(base))}) == 5
    assert weights_version(str(base)) == fingerprint(str(base))


@pytest.mark.parametrize("name", ["r.jsonl", "deep/er/r.parquet"])
def test_a_fingerprint_of_a_folder_changes_with_its_data(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"one")
    before = fingerprint(str(tmp_path))
    (tmp_path / name).write_bytes(b"two")
    after = fingerprint(str(tmp_path))
    assert len({before, after, ""}) == 3
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "r.jsonl").write_bytes(b"no row of the data")
    assert fingerprint(str(tmp_path)) == after


def test_a_limit_chooses_the_same_prompts_for_models_that_drop_different_ones(sharp_folders, tmp_path):
    texts = ["a" * (100 if number in (0, 3) else 5) for number in range(8)]
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": text} for text in texts])
    config = WinrateConfig(models=[sharp_folders["tiny-gpt2"], "x"], prompts=prompts, limit=4, reward_model="r",
                           output=str(tmp_path / "out"), dtype="float32", max_new_tokens=2, overlong="drop")  # fmt: skip
    evaluated = next(open_models(config.models[:1], open_context(config.output, config)))
    assert list(sample_answers(config, config, "all", evaluated)) == ["1", "3", "5", "7"]
    few = replace(config, max_prompt_tokens=60)
    assert list(sample_answers(few, few, "some", evaluated)) == ["3", "5", "7"]
    with pytest.raises(UserError, match="all 1 prompts are too long"):
        sample_answers(replace(few, limit=1), few, "none", evaluated)


HI = ({"role": "user", "content": "Hi"},)
EXAMPLES = [("How are you?", "Fine."), ("Hi", "Hello."), ("Who?", "A program.")]


@pytest.fixture
def few_shot_data(tmp_path):
    rows = [{"prompt": question, "completion": answer} for question, answer in EXAMPLES]
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    rows.insert(1, {"prompt": turns, "completion": "d"})  # a conversation is no example
    return write_rows(tmp_path / "demonstrations.jsonl", rows)


def texts(conversation):
    return [turn["content"] for turn in conversation]


def test_examples_are_earlier_turns_and_the_instruction_opens_the_first():
    prompt = FewShotPrompt("Be brief.", (EXAMPLES[0], EXAMPLES[2]))
    few_shot = prompt.before(HI)
    assert texts(few_shot) == ["Be brief.\n\nHow are you?", "Fine.", "Who?", "A program.", "Hi"]
    assert [turn["role"] for turn in few_shot] == ["user", "assistant"] * 2 + ["user"]
    system = ({"role": "system", "content": "S"}, *HI)
    assert texts(prompt.before(system)) == ["S", "Be brief.\n\nHow are you?", "Fine.", "Who?", "A program.", "Hi"]
    assert texts(FewShotPrompt("Be brief.").before(HI)) == ["Be brief.\n\nHi"]
    assert FewShotPrompt().before(HI) == HI
    assert HI[0]["content"] == "Hi"  # left as it was
    # An example that gives the answer away is left out.
    assert texts(FewShotPrompt("", tuple(EXAMPLES)).before(HI)) == ["How are you?", "Fine.", "Who?", "A program.", "Hi"]


def test_examples_are_the_first_demonstrations_of_one_turn(few_shot_data):
    two = FewShotConfig(num_few_shot=2, few_shot_data=few_shot_data, instruction="x")
    assert two.few_shot_prompt() == FewShotPrompt("x", tuple(EXAMPLES[:2]))
    assert FewShotConfig(few_shot_data="no/such/file").few_shot_prompt() == FewShotPrompt()
    with pytest.raises(UserError, match="num_few_shot is 4, but only 3"):
        replace(two, num_few_shot=4).few_shot_prompt()


def test_only_the_model_that_is_named_for_it_reads_the_examples(few_shot_data, tmp_path):
    config = WinrateConfig(
        models=["tiny-llama", "tiny-llama+few_shot"], num_few_shot=1, few_shot_data=few_shot_data, judge="m:f",
        dtype="float32",
        output=str(tmp_path), max_new_tokens=4, prompts=few_shot_data,
    )  # fmt: skip
    plain, few_shot = open_both(config, few_shot=config).values()
    assert (plain.name, few_shot.name) == ("tiny-llama", "tiny-llama+few_shot")
    assert plain.fingerprint != few_shot.fingerprint
    tokenization = plain.loaded.tokenization
    assert plain.prompt_ids(HI) == tokenization.prompt_ids(HI)
    assert few_shot.prompt_ids(HI) == tokenization.prompt_ids(FewShotPrompt("", tuple(EXAMPLES[:1])).before(HI))
    answers = [sample_answers(config, config, "winrate", evaluated) for evaluated in (plain, few_shot)]
    assert all(answers[0][number][0].prompt_ids == answers[1][number][0].prompt_ids for number in answers[0])  # for judges
    assert any(answers[0][number][0].ids != answers[1][number][0].ids for number in answers[0])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"models": ["tiny-llama+few_shot"]}, "tiny-llama.few_shot ends in .few_shot; set num_few_shot or instruction"),
        ({"models": ["tiny-llama"], "num_few_shot": 1}, "add one, such as tiny-llama.few_shot"),
        ({"models": ["tiny-llama+few_shot"], "num_few_shot": 1, "few_shot_data": "no/such.jsonl"}, "no/such.jsonl"),
    ],
)
def test_a_mistake_is_one_line(settings, complaint):
    config = ToxicityConfig(**settings)
    with pytest.raises(UserError, match=complaint) as caught:
        open_both(config, few_shot=config)
    assert "\n" not in str(caught.value)


def test_sample_reads_the_examples_and_writes_the_prompt_alone(few_shot_data, tmp_path):
    settings = {"model": "tiny-llama", "prompts": few_shot_data, "max_new_tokens": 6, "dtype": "float32"}
    rows = []
    for name, more in (("plain", {}), ("few_shot", {"num_few_shot": 2, "few_shot_data": few_shot_data})):
        path = run_sample(SampleConfig(output=str(tmp_path / f"{name}.jsonl"), **settings, **more))
        rows.append(read_rows(path))
    assert [row["prompt"] for row in rows[0]] == [row["prompt"] for row in rows[1]]
    assert [row["responses"] for row in rows[0]] != [row["responses"] for row in rows[1]]
