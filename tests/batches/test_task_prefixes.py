import pytest

from align.batches.encoding import Limits, encode_demonstrations, encode_prompts, encode_rankings
from align.batches.mixtures import Mixture, encode_mixture
from align.core.errors import UserError
from align.core.settings_parser import parse
from align.data.conversation import user_turn
from align.extras.plan import sft_work
from align.reward import RewardConfig
from align.sft import SFTConfig
from tests.files import write_rows

GERMAN, NEWS = "translate English to German: ", "summarize: "
LIMITS = Limits(200, 200)


@pytest.fixture
def write(tmp_path):
    return lambda name, *rows: write_rows(tmp_path / name, rows)


@pytest.fixture
def sources(write):
    german = write("german.jsonl", {"prompt": "That is good.", "completion": "Das ist gut."})
    news = write("news.jsonl", *({"prompt": f"Page {n}.", "completion": f"{n}."} for n in range(3)))
    return f"{german}, {news}"


@pytest.fixture(params=["plain", "template"])
def loaded(request, load_sharp, tmp_path):
    (template := tmp_path / "chat.jinja").write_text(
        "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return load_sharp("tiny-llama", chat_template="plain" if request.param == "plain" else str(template))


def test_prompts_are_those_of_the_text_with_its_prefix(sources, loaded):
    prompts, sizes, _ = encode_mixture(sources, lambda data: encode_prompts(data, loaded, LIMITS, False), [GERMAN, NEWS])
    texts = [f"{GERMAN}That is good.", *(f"{NEWS}Page {n}." for n in range(3))]
    assert sizes == [1, 3]
    assert [prompt.ids for prompt in prompts] == [loaded.tokenization.prompt_ids(user_turn(text)) for text in texts]
    assert [prompt.conversation for prompt in prompts] == list(map(user_turn, texts))


def test_only_the_first_user_turn_gets_it_and_no_source_has_to(write, loaded):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One."}]
    talk = [*turns, {"role": "assistant", "content": "Eins."}, {"role": "user", "content": "Two."}]
    ranking = {"prompt": talk, "responses": ["Zwei.", "Drei."], "ranks": [1, 2]}
    whole = {"messages": [*talk, {"role": "assistant", "content": "Zwei."}]}
    named = [talk[0], {"role": "user", "content": f"{GERMAN}One."}, *talk[2:]]

    def both(data, prefixes, read):
        return encode_mixture(
            Mixture([data, data], [1, 1]), lambda part: read(part, loaded, LIMITS, False), prefixes
        ).examples

    rankings, rows = both([ranking], [GERMAN, ""], encode_rankings), both([whole], [GERMAN, ""], encode_demonstrations)
    assert rankings[1:] == both([ranking], [], encode_rankings)[1:]  # '' changes nothing
    assert rows == [
        *encode_demonstrations([{"messages": [*named, whole["messages"][-1]]}], loaded, LIMITS, False),
        *encode_demonstrations([whole], loaded, LIMITS, False),
    ]
    assert rankings[0].prompt == loaded.tokenization.prompt_ids(tuple(named))
    assert rankings[0].responses == rankings[1].responses


def test_a_plan_counts_it(sources, tmp_path):
    def learning(*words):
        settings = ["--model", "tiny-llama", "--train_data", sources, "--output_dir", str(tmp_path), *words]
        return sft_work(parse(SFTConfig, settings)).flops["learning"]

    assert learning("--task_prefixes", GERMAN, NEWS) > 1.2 * learning()


@pytest.mark.parametrize("kind", [SFTConfig, RewardConfig])
def test_what_would_be_cut_off_is_refused(kind):
    with pytest.raises(UserError, match=r"task_prefixes is .* must be empty with overlong truncate"):
        parse(kind, ["--task_prefixes", GERMAN, NEWS, "--overlong", "truncate"])


def test_another_number_than_that_of_sources_is_one_line(sources):
    with pytest.raises(UserError, match=r"task_prefixes must contain one prefix per source.*1 for 2 of train_data$"):
        encode_mixture(sources, lambda data: [], [GERMAN])
    assert parse(SFTConfig, ["--task_prefixes", GERMAN, ""]).task_prefixes == [GERMAN, ""]


def test_an_error_names_the_file(write, loaded):
    long = write("long.jsonl", {"prompt": "One.", "completion": "x" * 300})
    with pytest.raises(UserError, match=r"long.jsonl: record 1: the response has \d+ tokens"):
        encode_mixture(long, lambda data: encode_demonstrations(data, loaded, LIMITS, False), [NEWS])
