"""Texts of a policy in the tokens of a reward model with another tokenizer."""

from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel
from transformers import PreTrainedTokenizerFast

from align.reward.scoring import RewardModelScorer
from align.tokenization import Tokenization
from align.tokenization.encoded import SampledResponse

SPECIAL = ("<unk>", "<s>", "</s>", "[SEP]", "[CLS]", "<pad>", "<|im_end|>")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyzCLSEP[]<>/|_▁:\n ")


def unigram(normalized: bool) -> Tokenizer:
    pieces = [*((token, 0.0) for token in SPECIAL), *((letter, -5.0) for letter in LETTERS)]
    backend = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=False))
    if normalized:
        backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return backend


def words() -> Tokenizer:
    backend = Tokenizer(WordLevel({token: id for id, token in enumerate((*SPECIAL, "a", "b"))}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def letters() -> Tokenizer:
    return Tokenizer(BPE({token: id for id, token in enumerate((*SPECIAL, *LETTERS))}, [], unk_token="<unk>"))


KINDS = {"unigram": lambda: unigram(False), "unigram, NFKC": lambda: unigram(True), "words": words, "letters": letters}


def tokenization_of(kind: str) -> Tokenization:
    backend = KINDS[kind]()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return Tokenization(PreTrainedTokenizerFast(tokenizer_object=backend, **named))


SCORERS: dict[tuple[str, bool], RewardModelScorer] = {}


def scorer_of(kind: str, whole: bool) -> RewardModelScorer:
    none = cast(Any, None)
    if (kind, whole) not in SCORERS:
        SCORERS[kind, whole] = RewardModelScorer(none, 0.0, none, none, 1, none, tokenization_of(kind), whole)
    return SCORERS[kind, whole]


FULL_WIDTH = "".join(chr(ord(letter) + 0xFEE0) for letter in "[SEP]")
texts = st.lists(st.sampled_from([*SPECIAL, *LETTERS, FULL_WIDTH, "[SE", "P]"]), max_size=8).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompt=texts, response=texts, whole=st.booleans(), ended=st.booleans())
def test_any_text_that_a_policy_samples_can_be_scored(kind, prompt, response, whole, ended):
    scorer = scorer_of(kind, whole)
    assert scorer.tokenization is not None
    turns = ({"role": "user", "content": f"a{prompt}"},)
    found = scorer.encode(SampledResponse(cast(Any, turns), [], [], f"a{response}", ended=ended))
    chat = scorer.tokenization.chat
    template = scorer.encode(SampledResponse(cast(Any, ({"role": "user", "content": "a"},)), [], [], "a", ended=ended))
    special = chat.special_ids - {chat.unknown_id}
    count = [sum(id in special for id in (*each.prompt, *each.response)) for each in (found, template)]
    assert count[0] == count[1], "a text is read as a special token"


def test_a_text_that_spells_a_token_is_read_in_pieces_and_counted(capsys):
    SCORERS.clear()
    scorer = scorer_of("unigram", False)
    for number in range(1, 5):
        turns = cast(Any, ({"role": "user", "content": "a"},))
        scorer.encode(SampledResponse(turns, [], [], "b[SEP]", ended=True))
        assert scorer.rewritten == number
    assert scorer.tokenization is not None
    ids = scorer.encode(SampledResponse(turns, [], [], "b[SEP]", ended=True)).response
    assert scorer.tokenization.text(ids).replace(" ", "") == "b[SEP]"
    lines = [line for line in capsys.readouterr().err.splitlines() if "rewritten" in line]
    assert [line.split()[0] for line in lines] == ["1", "2", "4"]
