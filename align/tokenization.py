"""Chat templates and special tokens: the only place that touches a tokenizer's settings.

Every conversation goes through a chat template, in all stages alike: the tokenizer's own, a plain dialogue where it has
none, or none at all (`raw`) for text to be continued. A response always ends with the token that ends an assistant turn.

Only a template writes special tokens. A message that spells one (`<|im_end|>`, `</s>`) is read as these characters: no
prompt can end its own turn, and no labeler's text an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from align.data.records import Conversation, Demonstration
from align.errors import UserError
from align.models.zoo import resolve_model

# For a tokenizer without a template: much like the dialogues of HH-RLHF, which base models continue well. Words stand on a
# line of their own: a byte-pair tokenizer would join a space to the word behind it, and the prompt would end in another
# token than it has in front of an earlier answer. Line breaks are quoted, for transformers drops one behind a `%}`.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'Human', 'assistant': 'Assistant', 'system': 'System'}[m.role] + ':\n' }}"
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
# Text as it is: prompts that a model continues. Turns of a conversation stand on lines of their own.
RAW_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)
NAMED_TEMPLATES = {"plain": PLAIN_TEMPLATE, "raw": RAW_TEMPLATE}


class SpellingError(UserError):
    """A text spells a special token, and the tokenizer cannot read it as anything else."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One example for supervised fine-tuning: what is read and what follows it.

    `learn[i]` says whether token i of the response counts in the loss: in a conversation of several turns the response
    also holds the user's turns between.
    """

    prompt: list[int]
    response: list[int]
    learn: list[bool]


class Tokenization:
    """A tokenizer with its chat template, end tokens and limits settled.

    Args:
        tokenizer: from `AutoTokenizer`.
        chat_template: `auto` (the tokenizer's own, else `plain`), `plain`, `raw`, or the path of a Jinja file.
        extra_end_ids: more ids that end a response, from the model's generation config.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str = "auto", extra_end_ids: tuple[int, ...] = ()
    ) -> None:
        self.tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token: a response could not be told from an unfinished one"
            )
        self._set_template(chat_template)
        added = tokenizer.added_tokens_decoder
        # Some tokenizers (Llama 3, Phi 3) list the end of a turn only among the added tokens.
        self.special_ids = frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
        # Gemma and GPT-NeoX list line breaks and rows of spaces among the added tokens.
        self._spellings = tuple(token.content for token in added.values() if not token.content.isspace())
        self.end_id = self._find_end_of_turn()
        self.end_ids = frozenset({self.end_id, tokenizer.eos_token_id, *extra_end_ids})
        # Padding is never read (lengths say where text ends), so any id will do where the tokenizer names none.
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def _set_template(self, chat_template: str) -> None:
        if chat_template in NAMED_TEMPLATES:
            self.tokenizer.chat_template = NAMED_TEMPLATES[chat_template]
        elif chat_template == "auto":
            self.tokenizer.chat_template = self.tokenizer.chat_template or PLAIN_TEMPLATE
        else:
            try:
                self.tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
            except OSError as error:
                raise UserError(
                    f"chat_template '{chat_template}': {error.strerror}; give auto, plain, raw or the path of a Jinja file"
                ) from error

    def _find_end_of_turn(self) -> int:
        """The token that the template puts behind an assistant's words; end-of-sequence if it puts none."""
        marker = "The answer."
        text = self._render(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": marker}), False)
        after = self.tokenizer(text.rsplit(marker, 1)[-1], add_special_tokens=False).input_ids
        return after[0] if after and after[0] in self.special_ids else self.tokenizer.eos_token_id

    def _render(self, messages: Conversation, generation_prompt: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            _as_dicts(messages),
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        """Ids of what a template wrote: special tokens are what they spell."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _encode_words(self, text: str) -> list[int]:
        """Ids of what a person or a model wrote, none of them special.

        Raises:
            SpellingError: if the tokenizer makes a special token of it nevertheless, as sentencepiece's may.
        """
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        special = self.special_ids.intersection(ids)
        if special:
            raise SpellingError(
                f"the tokenizer reads {self.tokenizer.decode([min(special)])!r} as its own; take it out of the text"
            )
        return ids

    def _spells_token(self, messages: Conversation) -> bool:
        return any(spelling in message["content"] for message in messages for spelling in self._spellings)

    def _encode_apart(self, messages: Conversation) -> list[int]:
        """Ids of a rendering in which the tokens that messages spell are read as characters."""
        try:
            ids = self.tokenizer.apply_chat_template(
                _as_dicts(messages),
                add_generation_prompt=True,
                return_dict=False,
                sanitize_control_tokens=True,
            )
        except ValueError as error:
            raise SpellingError(f"{first_line(error)}; take it out of the text") from error
        return cast(list[int], ids)

    def prompt_ids(self, prompt: Conversation) -> list[int]:
        """The prompt up to where the assistant's turn begins.

        Raises:
            SpellingError: if a message spells a special token that the tokenizer cannot read as characters.
        """
        ids = self._encode_apart(prompt) if self._spells_token(prompt) else self._encode(self._render(prompt))
        before, after = self._added()
        # T5's encoder expects `</s>` behind its input, which its tokenizer adds by itself and a template leaves out. A
        # model's own template writes what it wants in front; base models want the `<s>` that their tokenizer adds.
        own = self.tokenizer.chat_template not in NAMED_TEMPLATES.values()
        return [*ids, *after] if own else [*before, *ids, *after]

    def _added(self) -> tuple[list[int], list[int]]:
        """Special ids that the tokenizer puts before and behind every text (Llama: `<s>` before; T5: `</s>` behind)."""
        plain, full = self._encode("a"), self.tokenizer("a").input_ids
        start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
        return full[:start], full[start + len(plain) :]

    def response_ids(self, text: str) -> list[int]:
        """The response and the token that ends it."""
        return [*self._encode_words(text), self.end_id]

    def continuations(self, text: str, following: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Token ids of a plain text, and of each of several texts that may follow it.

        Text and continuation are tokenized as one and cut where the text's own ids end, because a byte-pair tokenizer
        joins a space to the word behind it (lm-eval cuts at the same place). A tokenizer that closes every text with a
        special token, such as T5's, reads them apart.

        Raises:
            UserError: if a continuation has no token of its own.
        """
        before, after = self._added()
        alone, words = self._encode_words(text), self._encode_words
        found = [words(more) if after else words(text + more)[len(alone) :] for more in following]
        for more, ids in zip(following, found, strict=True):
            if not ids:
                raise UserError(f"{more!r} has no token of its own behind {text[-20:]!r}: nothing could be predicted")
        return [*before, *alone, *after], found

    def text(self, ids: list[int]) -> str:
        """The words of a response, without special tokens."""
        decoded = self.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(decoded, str)
        return decoded.strip()

    def reads_alike(self, other: "Tokenization") -> bool:
        """Whether token ids mean the same to both, down to what ends a prompt (T5's `</s>`) and a turn."""
        roles = ("user", "assistant", "user")
        probe: Conversation = tuple({"role": role, "content": "a"} for role in roles)
        return (
            self.tokenizer.get_vocab() == other.tokenizer.get_vocab()
            and self.tokenizer.chat_template == other.tokenizer.chat_template
            and self.prompt_ids(probe) == other.prompt_ids(probe)
            and self.end_id == other.end_id
        )

    def turns(self, demonstration: Demonstration, one_row: bool) -> list[Turn]:
        """Examples that teach each assistant turn of a demonstration's continuation.

        Args:
            one_row: True lays the whole continuation in one response with the user's turns masked, so that nothing is
                read twice; False (and templates that rewrite earlier turns) gives an example for each turn.
        """
        messages = (*demonstration.prompt, *demonstration.continuation)
        spoken = [i for i in range(len(demonstration.prompt), len(messages)) if messages[i]["role"] == "assistant"]
        if one_row and len(spoken) > 1:
            joined = self._join(messages, spoken)
            if joined is not None:
                return [joined]
        return [self._turn(messages, i) for i in spoken]

    def _turn(self, messages: Conversation, index: int) -> Turn:
        response = self.response_ids(messages[index]["content"])
        return Turn(self.prompt_ids(messages[:index]), response, [True] * len(response))

    def _join(self, messages: Conversation, spoken: list[int]) -> Turn | None:
        """All turns in one row; None if the template does not continue its own rendering word for word.

        None also if a message spells a token: what stands between two answers is template and message in one text.
        """
        if self._spells_token(messages):
            return None
        response: list[int] = []
        learn: list[bool] = []
        end = str(self.tokenizer.decode([self.end_id]))
        rendered = self._render(messages[: spoken[0]])
        for number, index in enumerate(spoken):
            words = self.response_ids(messages[index]["content"])
            response, learn = response + words, learn + [True] * len(words)
            if number + 1 < len(spoken):
                head = rendered + messages[index]["content"] + end
                following = self._render(messages[: spoken[number + 1]])
                if not following.startswith(head):
                    return None
                between = self._encode(following[len(head) :])
                response, learn, rendered = response + between, learn + [False] * len(between), following
        return Turn(self.prompt_ids(messages[: spoken[0]]), response, learn)


def _as_dicts(messages: Conversation) -> list[dict[str, str]]:
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def load_tokenization(model: str, chat_template: str = "auto") -> Tokenization:
    """The tokenization of a model name, a local folder or a hub name.

    Raises:
        UserError: if the tokenizer cannot be loaded.
    """
    source = resolve_model(model)
    try:
        return Tokenization(AutoTokenizer.from_pretrained(source), chat_template)
    except (OSError, ValueError) as error:
        raise UserError(f"model '{model}': its tokenizer cannot be loaded ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's message: libraries write pages, a user gets one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
