import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.extras.distill import DistillConfig, DistillTrainer
from align.extras.distill.loss import LossWeights, cosine_distance, distillation_loss, soft_cross_entropy
from align.extras.distill.train import DistillForm, Predictor, make_student
from align.models.loading import load
from align.sft.train import token_counts
from align.tokenization.encoded import EncodedDemonstration
from align.training.setup import build_engine
from tests.extras.running import command, settings
from tests.files import read_rows, write_rows
from tests.models.losses import assert_invariant, loss_of_rows

ROWS = [{"prompt": f"Name the number {n}.", "completion": f"It is {n}."} for n in range(12)]

WEIGHTS = LossWeights(5.0, 2.0, 1.0, 2.0)


def test_cross_entropy_at_a_temperature_by_hand():
    # At temperature 2: teacher (2, 0) / 2 is sigmoid(1) = 0.7310586, student (0, 0) is one half everywhere: log 2.
    teacher, student = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    assert float(soft_cross_entropy(student, teacher, 2.0)) == pytest.approx(math.log(2), abs=1e-6)
    # Student (0, 2): -(0.7310586 log 0.2689414 + 0.2689414 log 0.7310586) = 0.9601192 + 0.0842497... by hand:
    expected = -(0.7310586 * math.log(0.2689414) + 0.2689414 * math.log(0.7310586))
    assert float(soft_cross_entropy(torch.tensor([[0.0, 2.0]]), teacher, 2.0)) == pytest.approx(expected, abs=1e-6)
    # Its gradient is (student - teacher) / temperature.
    logits = torch.tensor([[0.0, 2.0]], requires_grad=True)
    soft_cross_entropy(logits, teacher, 2.0).sum().backward()
    assert logits.grad.tolist()[0] == pytest.approx([(0.2689414 - 0.7310586) / 2, (0.7310586 - 0.2689414) / 2], abs=1e-6)


def test_many_rows_are_computed_in_parts_to_the_same_numbers(monkeypatch):
    logits, wanted = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    whole = soft_cross_entropy(logits, wanted, 1.5)
    monkeypatch.setattr("align.extras.distill.loss.CHUNK", {"cpu": 10})
    assert torch.equal(soft_cross_entropy(logits, wanted, 1.5), whole)
    assert soft_cross_entropy(logits[:0], wanted[:0], 1.5).shape == (0,)


def test_cosine_and_the_sum_by_hand():
    states = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [3.0, 4.0]])
    others = torch.tensor([[5.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [4.0, 3.0]])
    assert cosine_distance(states, others).tolist() == pytest.approx([0, 1, 2, 1 - 24 / 25], abs=1e-6)
    # 5 * 4 * (1 + 2) / 3 + 2 * (0.5 + 0.7) / 3 + (0.1 + 0.2) / 3
    parts = (torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.7]), torch.tensor([0.1, 0.2]))
    assert float(distillation_loss(*parts, 3, WEIGHTS)) == pytest.approx(20 + 0.8 + 0.1)


class Stage:
    """Models that are loaded, and a batch."""

    def __init__(self, run, teacher, student, examples, weights=WEIGHTS):
        teacher.backbone.eval().requires_grad_(False)
        self.form, self.batch = DistillForm(teacher, student, weights), examples
        self.engine = build_engine(run, Predictor(student.backbone), 1)

    def loss(self):
        device = self.engine.accelerator.device
        return self.form.batch_loss(self.engine.module, device, self.batch, self.batch)

    def evaluate(self, examples):
        return self.form.evaluate(self.engine, examples, 4096)


@pytest.fixture
def make_stage(make_run):
    """`make_stage(teacher, student, examples, **values)`: the stage around models that are loaded."""
    return lambda *models, **values: Stage(make_run(DistillConfig, "distill"), *models, **values)


def half_of(teacher):
    """A student with every other layer."""
    return make_student(teacher, "", 2, True, ModelConfig())


def examples_of(rollout):
    """Every third response token of every other example does not count."""
    return [
        EncodedDemonstration(prompt.ids, ids, [bool(i % 3) or row % 2 == 0 for i in range(len(ids))])
        for row, (prompt, ids) in enumerate(zip(rollout.prompts, rollout.responses, strict=True))
    ]


@pytest.mark.parametrize("values", [{}, {"weights": LossWeights(5.0, 0.0, 0.0, 2.0)}], ids=str)
def test_padding_order_and_micro_batches_change_nothing(tiny_name, load_sharp, make_stage, hand_rollout, values):
    teacher = load_sharp(tiny_name)
    stage = make_stage(teacher, half_of(teacher), examples_of(hand_rollout), **values)

    def loss_of(model, examples, batch, device):
        return stage.form.batch_loss(model, device, examples, batch)

    assert_invariant(stage.engine, token_counts(stage.batch), loss_of_rows(loss_of, stage.engine, stage.batch))


def test_an_identical_student_has_the_teachers_entropy_and_no_cosine_loss(tiny_name, load_sharp, make_stage, hand_rollout):
    examples, weights = examples_of(hand_rollout), WEIGHTS._replace(temperature=3.0)
    stage = make_stage(load_sharp(tiny_name), load_sharp(tiny_name), examples, weights=weights)
    _, sums = stage.loss()
    assert float(sums["ce"]) == pytest.approx(float(sums["entropy"]), rel=1e-5)
    assert float(sums["entropy"]) > 1
    found = stage.evaluate(examples)
    assert found["validation/loss/cosine"] == pytest.approx(0.0, abs=1e-5)
    assert found["validation/kl"] == pytest.approx(0.0, abs=1e-5)
    half = make_stage(load_sharp(tiny_name), half_of(load_sharp(tiny_name)), examples)
    assert half.evaluate(examples)["validation/kl"] > 0.01


@torch.no_grad()
def test_the_language_model_loss_is_the_mean_over_the_tokens_that_count(tiny_name, load_sharp, make_stage, hand_rollout):
    teacher = load_sharp(tiny_name)
    student, examples, total, count = half_of(teacher), examples_of(hand_rollout), 0.0, 0
    stage = make_stage(teacher, student, examples)
    for example in examples:
        prompt, response = (Padded.from_lists([ids]) for ids in (example.prompt, example.response))
        every = torch.log_softmax(student.backbone.logits(student.backbone.hidden(prompt, response)[0, :-1]), -1)
        for place, (token, counts) in enumerate(zip(example.response, example.loss_mask, strict=True)):
            total, count = total - counts * float(every[place, token]), count + counts
    assert count < sum(len(example.response) for example in examples)
    assert stage.evaluate(examples)["validation/loss/lm"] == pytest.approx(total / count, abs=1e-5)


def test_students(load_sharp, sharp_folders, tmp_path):
    teacher = load_sharp("tiny-llama")
    half = half_of(teacher)
    layers = [weight.numel() for name, weight in teacher.backbone.model.named_parameters() if ".layers.1." in name]
    assert teacher.backbone.model.num_parameters() - half.backbone.model.num_parameters() == sum(layers) > 0
    assert half.tokenization is teacher.tokenization
    same = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(*(each.backbone.model.get_parameter(same) for each in (teacher, half)))
    named = make_student(teacher, sharp_folders["tiny-gpt2"], 2, True, ModelConfig(dtype="float32"))
    assert named.backbone.model.config.model_type == "gpt2"


def test_a_student_comes_nearer_to_its_teacher(tmp_path, sharp_folders):
    short = settings(tmp_path, num_train_epochs=4, batch_size=4, max_response_tokens=16, learning_rate=1e-3)
    DistillTrainer(sharp_folders["tiny-llama"], ROWS, DistillConfig(**short), ROWS[:4]).train()
    found = [row["validation/kl"] for row in read_rows(tmp_path / "metrics.jsonl") if "validation/kl" in row]
    assert 0 < found[-1] < found[0]


def test_a_whole_run_writes_a_student_that_loads(tiny_name, tmp_path, capsys):
    data = write_rows(tmp_path / "data.jsonl", ROWS)
    words = f"--model {tiny_name} --train_data {data} --batch_size 6"
    command(f"distill {words} --dtype float32 --max_response_tokens 24 --report_to none --output_dir {tmp_path / 'run'}")
    printed = capsys.readouterr().err
    assert "student has 0.1 million parameters" in printed
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["update"] for row in rows] == [0, 1, 2]  # 0 is the evaluation before the first
    loaded = load(ModelConfig(model=str(tmp_path / "run" / "model"), dtype="float32"), torch.float32)
    assert loaded.backbone.model.config.num_hidden_layers == 1
    assert "| teacher |" in (tmp_path / "run" / "model" / "README.md").read_text()


def widened(folder, to, rows):
    """A copy of a model whose matrices have further rows of padding, which no token has."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    return str(to)


@pytest.mark.parametrize("wider", ["teacher", "student"])
def test_rows_of_padding_in_either_matrix_change_no_cross_entropy(wider, sharp_folders, tmp_path):
    losses = []
    for name, teacher_rows, student_rows in (
        ("alike", 264, 264),
        (wider, 280 if wider == "teacher" else 264, 272 if wider == "student" else 264),
    ):
        teacher = widened(sharp_folders["tiny-llama"], tmp_path / f"{name}-teacher", teacher_rows)
        student = widened(sharp_folders["tiny-llama"], tmp_path / f"{name}-student", student_rows)
        more = {"student": student, "batch_size": 4, "max_response_tokens": 16, "lm_weight": 0.0}
        config = DistillConfig(**settings(tmp_path / name, **more))
        DistillTrainer(teacher, ROWS[:4], config, ROWS[:4]).train()
        first = read_rows(tmp_path / name / "metrics.jsonl")[0]
        losses.append([first[f"validation/{part}"] for part in ("loss/ce", "kl", "loss/cosine")])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"student": "tiny-t5"}, "different vocabularies"),
        ({"lora_r": 4}, "lora_r is 4, but must be 0"),
        ({"keep_every_nth_layer": 1}, "keep_every_nth_layer is 1, but must be 2 or more"),
        ({"ce_weight": 0.0, "lm_weight": 0.0, "cosine_weight": 0.0}, "ce_weight"),
        ({"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_a_mistake_is_one_line(load_sharp, values, complaint):
    teacher = load_sharp("tiny-llama")
    if values.get("student"):
        teacher.tokenization.tokenizer.add_tokens(["<another>"])

    def make():
        config = DistillConfig(**values)
        make_student(teacher, config.student, config.keep_every_nth_layer, True, config)

    with pytest.raises(UserError, match=complaint) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_run_from_python_needs_no_adapter_on_the_teacher(tmp_path, load_sharp):
    config = DistillConfig(**settings(tmp_path))
    with pytest.raises(UserError, match="must not have an adapter"):
        DistillTrainer(load_sharp("tiny-llama", lora_r=4), ROWS, config)
    assert not Path(tmp_path, "metrics.jsonl").exists()
