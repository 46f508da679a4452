import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator

from align.batches.encoding import Limits
from align.core.errors import UserError
from align.extras.attributes import AttributeConfig, AttributeTrainer
from align.extras.attributes.attribute_rewards import AttributeScorer
from align.extras.attributes.generative import AttributeText, GenerativeForm, GenerativeModel, Questions
from align.extras.attributes.model import Head, heads_of
from align.extras.attributes.train import read_ratings
from align.extras.rules.judgments import JudgedResponse, split_judgments
from align.reward.rankings import pack_rankings
from tests.extras.rules.planted import sampled
from tests.extras.running import settings
from tests.files import read_rows

from .test_attribute_models import HI, planted

HEADS = [Head("rating", "scale"), Head("unsafe", "binary")]
LIMITS = Limits(200, 200)


def config_of(folder, **more):
    return AttributeConfig(**settings(folder, batch_size=8, validation_split=0.2, form="generative", **more))


def encode(loaded, attributes, generator_filter="", response="Yo"):
    form = GenerativeForm(loaded, HEADS, generator_filter)
    (item,) = form.encode([JudgedResponse(HI, response, attributes)], LIMITS)
    return form.questions, item


def test_the_generator_learns_the_response_and_the_discriminator_the_rating_token_by_token(load_sharp):
    loaded = load_sharp("tiny-llama")
    tokenization = loaded.tokenization
    questions, item = encode(loaded, {"unsafe": 1.0, "rating": 6.0})
    alone, asked = item.parts
    context, response = tokenization.prompt_ids(HI), tokenization.response_ids("Yo")
    assert alone.prompt == context
    assert alone.responses == [response]
    assert alone.learned == [len(response)]  # the token that ends the turn too
    assert asked.prompt == [*context, *response]
    assert [tokenization.tokenizer.decode(ids) for ids in asked.responses] == ["\nRATING ", "\nUNSAFE "]
    assert asked.learned == [0, 0]  # no byte of a name is learned
    said = [
        {tokenization.text([token]): share for token, share in zip(questions.answers, row, strict=True) if share}
        for row in asked.shares
    ]
    assert said == [{"6": 1.0}, {"1": 1.0}]
    assert {tokenization.text([token]) for token in questions.answers} == set("01234567")


def test_the_loss_of_a_text_is_that_of_its_tokens_read_one_after_the_other(load_sharp):
    """Packed log-probs against those of whole texts by the plain model: of every token that counts, and of no other."""
    loaded = load_sharp("tiny-llama")
    questions, item = encode(loaded, {"unsafe": 0.25, "rating": 4.5})
    model = GenerativeModel(loaded.backbone, questions)
    inputs = pack_rankings(item.parts, torch.device("cpu"))
    learned = torch.tensor([bool(tokens) for part in item.parts for tokens in part.learned])
    mask = inputs.response.mask() & learned[:, None]
    with torch.no_grad():
        answers, log_probs = model(inputs.prompt, inputs.response, inputs.prompt_of_response, mask)

        def next_log_probs(ids):
            return torch.log_softmax(loaded.backbone.model(torch.tensor([ids])).logits[0].double(), -1)

        context, own = item.parts[0].prompt, item.parts[0].responses[0]
        whole = next_log_probs([*context, *own])
        by_hand = [float(whole[len(context) - 1 + place, token]) for place, token in enumerate(own)]
        assert log_probs[0, : len(own)].tolist() == pytest.approx(by_hand, abs=1e-4)
        assert not log_probs[1:].any()
        for number, question in enumerate(item.rated_part.responses):
            last = next_log_probs([*item.rated_part.prompt, *question])[-1]
            assert answers[1 + number].tolist() == pytest.approx(last[questions.answers].tolist(), abs=1e-4)
    shares = [sum(row) for row in item.rated_part.shares]
    assert shares == [1.0, 1.0]
    assert questions.shares(0, 4.5)[questions.answers.index(questions.texts[0].answers[3])] == 0.5
    zero, one = (questions.answers.index(token) for token in questions.texts[1].answers)
    assert (item.rated_part.shares[1][zero], item.rated_part.shares[1][one]) == (0.75, 0.25)


def test_ratings_by_hand(load_sharp):
    questions = Questions(HEADS, load_sharp("tiny-llama").tokenization)
    answers = torch.full((2, 8), 3.0)
    zero, one = (questions.answers.index(token) for token in questions.texts[1].answers)
    answers[1, zero], answers[1, one] = math.log(0.2), math.log(0.6)
    rating, unsafe = questions.ratings(answers, [0, 1])
    assert rating == pytest.approx(4.0)  # the mean of 1 to 7
    assert unsafe == pytest.approx(0.75)  # 0.6 / (0.2 + 0.6): other tokens do not count


def test_the_generator_learns_what_passes_alone(load_sharp):
    loaded = load_sharp("tiny-llama")
    for chosen, attributes, learned in [
        ("unsafe<0.5", {"unsafe": 0.0}, True),
        ("unsafe<0.5", {"unsafe": 1.0}, False),
        ("unsafe<0.5", {"rating": 7.0}, False),  # nobody judged whether it is unsafe
        ("", {"unsafe": 1.0}, True),
    ]:
        assert (len(encode(loaded, attributes, chosen)[1].parts) == 2) is learned


def test_what_has_no_rating_token_is_refused(load_sharp, tmp_path):
    tokenization = load_sharp("tiny-llama").tokenization
    with pytest.raises(UserError, match="rankings; use form heads"):
        AttributeText.from_head(Head("preference", "ranking"), tokenization)
    with pytest.raises(UserError, match="must be empty with form generative"):
        config_of(tmp_path, rankings="data/rankings.jsonl")
    with pytest.raises(UserError, match="must be empty unless form is generative"):
        replace(config_of(tmp_path), form="heads", generator_filter="unsafe<1")


def test_one_model_rates_and_writes(tmp_path, align_cache):
    config = config_of(tmp_path, num_train_epochs=5, generator_filter="unsafe<0.5")
    trainer = AttributeTrainer("tiny-llama", planted(240), config)
    folder = trainer.train()
    metrics = read_rows(tmp_path / "metrics.jsonl")
    assert metrics[-1]["validation/head/unsafe/auc"] > 0.9
    assert metrics[-1]["validation/head/rating/correlation"] > 0.3
    assert metrics[-1]["loss/generator"] < 0.7 * metrics[0]["loss/generator"]
    assert heads_of(str(folder)) == HEADS
    loaded = trainer.loaded
    scorer = AttributeScorer(str(folder), "float32", loaded.tokenization, Accelerator(cpu=True), 4096)
    bad, good = scorer([sampled(loaded.tokenization, "door 7?", text) for text in ("sun 42 moon", "sun over moon")])
    assert bad["unsafe"] > 0.5 > good["unsafe"]
    assert 1 <= good["rating"] <= 7


@pytest.mark.parametrize(("model", "more"), [("tiny-t5", {}), ("tiny-gpt2", {"lora_r": 4}), ("tiny-llama", {})])
def test_from_disk_packed_or_apart_it_says_the_same(tmp_path, align_cache, model, more):
    trainer = AttributeTrainer(model, planted(24), config_of(tmp_path / "run", **more))
    folder = trainer.train()
    place = (trainer.loaded.tokenization, Accelerator(cpu=True))
    together, apart = (AttributeScorer(str(folder), "float32", *place, budget) for budget in (4096, 1))
    rows = [sampled(place[0], "door 7?", text) for text in ("sun 42 moon", "sun", "door")]
    said = [[list(each.values()) for each in scorer(rows)] for scorer in (together, apart)]
    assert torch.allclose(*map(torch.tensor, said), atol=1e-5)
    assert together.question_tokens > 0
    held_out = split_judgments(read_ratings(planted(24), False), (), 0.2, 0).validation
    rows = [sampled(place[0], item.prompt[0]["content"], item.response) for item in held_out]
    in_memory, on_disk = trainer.form.judge(trainer.engine, trainer.held_out, 4096)[0], together(rows)
    said = torch.tensor([[each["rating"], each["unsafe"]] for each in on_disk])
    judged = ~in_memory.isnan()
    assert judged.any()
    assert torch.allclose(in_memory[judged], said[judged], atol=1e-4)
