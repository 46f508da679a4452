import pytest
import torch

from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.data.conversation import user_turn
from align.extras.attributes import AttributeConfig, AttributeTrainer
from align.extras.attributes.attribute_rewards import AttributeRewards, sentences
from align.extras.attributes.model import load_attribute_model
from align.models.loading import load
from align.ppo.extensions import Extension
from align.ppo.records import Rollout
from align.tokenization.encoded import EncodedPrompt
from tests.extras.running import TINY, command, settings
from tests.files import write_rows

SEEN = []


class Recorder(Extension):
    """Keeps the experience of each update."""

    def after_update(self, update, experience):
        SEEN.append(experience)


@pytest.fixture(scope="module")
def policy(align_cache):
    return load(ModelConfig(model="tiny-llama"), torch.float32)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One is. Two are! Three", ["One is.", "One is. Two are!", "One is. Two are! Three"]),
        ("No end\nat all", ["No end", "No end\nat all"]),
        ("Grün 👍. Ja.", ["Grün 👍.", "Grün 👍. Ja."]),
        ("", []),
    ],
)
def test_a_sentence_ends_at_the_token_of_its_last_character(policy, text, parts):
    tokenization = policy.tokenization
    ids = tokenization.response_ids(text)
    found = sentences(ids, tokenization)
    assert [part for _, part in found] == parts
    for token, part in found:
        assert tokenization.text(ids[: token + 1]).startswith(part)
        assert not tokenization.text(ids[:token]).startswith(part)


def test_end_tokens_inside_a_response_have_no_text_but_a_place(policy):
    tokenization = policy.tokenization
    first, second, end = tokenization.text_ids("Yes. "), tokenization.text_ids("No."), tokenization.end_id
    found = sentences([*first, end, end, *second, end], tokenization)
    dot = len(tokenization.text_ids("Yes.")) - 1
    assert found == [(dot, "Yes."), (len(first) + 2 + len(second) - 1, "Yes. No.")]


@pytest.mark.parametrize("given_as_ids", [True, False], ids=["token ids", "cut prompt"])
def test_sentences_are_read_behind_the_prompt_of_the_policy(policy, given_as_ids):
    tokenization = policy.tokenization
    conversation = ({"role": "user", "content": "A long question?"},)
    prompt = EncodedPrompt(conversation, tokenization.text_ids("question?"), given_as_ids=given_as_ids)
    ids = tokenization.response_ids("Yes. No.")
    read = []

    def score(responses):
        read.extend(responses)
        return [{"wrong": 0.0}] * len(responses)

    rewards = AttributeRewards.__new__(AttributeRewards)
    rewards.policy, rewards.scorer, rewards.expression = tokenization, score, lambda values: 1.0
    found = rewards._segment_rewards(Rollout([prompt], [ids], [True], ["Yes. No."]))
    assert [(each.prompt_ids, each.given_as_ids) for each in read] == [(prompt.ids, given_as_ids)] * 2
    assert [each.ids for each in read] == [tokenization.response_ids(text) for text in ("Yes.", "Yes. No.")]
    assert found.nonzero().tolist() == [[0, token] for token, _ in sentences(ids, tokenization)]


def test_tokens_have_the_rewards_of_their_sentences(align_cache, tmp_path):
    rows = [
        {"prompt": f"Question {n}?", "response": text, "attributes": {"wrong": wrong}}
        for n in range(8)
        for text, wrong in (("It is so.", 0), ("It is so. It is 7.", 1))
    ]
    config = AttributeConfig(**settings(tmp_path / "errors"))
    model = str(AttributeTrainer("tiny-llama", rows, config).train())
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}])
    words = f"ppo {TINY} --prompts {prompts} --output_dir {tmp_path / 'ppo'} --total_updates 1 --rollout_batch_size 4"
    words += " --max_new_tokens 24 --kl_coef 0 --lam 1 --whiten_rewards false --missing_eos_score none"
    words += f" --attributes.model {model} --attributes.reward 1-2*wrong --attributes.segments true"
    SEEN.clear()
    command(f"{words} --extensions {__name__}:Recorder")
    (experience,) = SEEN
    assert experience.returns is not None
    heads, loaded = load_attribute_model(model, "float32")
    tokenization = loaded.tokenization
    assert experience.signal.scores.tolist() == pytest.approx([0] * 4, abs=1e-5)  # the tokens have all of it
    for row, ids in enumerate(experience.rollout.responses):
        returns = torch.cat([experience.returns[row, : len(ids)], torch.zeros(1)])
        rewards = returns[:-1] - returns[1:]  # without a discount, a return is the sum of the rewards from there on
        expected = torch.zeros(len(ids))
        found = sentences(ids, tokenization)
        for token, text in found:
            prompt, answer = tokenization.answer_ids(user_turn("Hi"), text, whole=False)
            wrong = torch.sigmoid(heads(Padded.from_lists([prompt]), Padded.from_lists([answer])))
            expected[token] += 1 - 2 * wrong.item()
        assert found
        assert torch.allclose(rewards, expected, atol=1e-4)
        assert experience.scores[row].item() == pytest.approx(expected.sum().item(), abs=1e-4)
