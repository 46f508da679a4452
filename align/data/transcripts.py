"""Conversations written as a single text: transcripts as in HH-RLHF (Bai et al. 2022), and HelpSteer's prompts.

"\n\nHuman: ...\n\nAssistant: ..."
"""

import re
from collections.abc import Sequence
from typing import Any

Turns = list[dict[str, Any]]
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_SPEAKER = re.compile(r"(?:\A\s*|\r?\n\r?\n)(Human|Assistant):")
"""Speaker name that starts a turn: at the beginning of the text or after a blank line. Elsewhere it is part of a message."""
_HELPSTEER_SPEAKER = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
"""Separator of turns in HelpSteer and HelpSteer 2 prompts. The first turn is the user's."""


def transcript_turns(text: str) -> Turns | None:
    """Parse a text that starts with a speaker name into stripped turns. Return None for any other text."""
    before, *parts = _SPEAKER.split(text)
    if before or not parts:
        return None
    return [
        {"role": SPEAKERS[name], "content": content.strip()} for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def joined(turns: Sequence[dict[str, Any]]) -> Turns:
    """Merge consecutive turns of the same speaker, because roles must alternate."""
    merged: Turns = []
    for turn in turns:
        if merged and merged[-1]["role"] == turn["role"]:
            turn = {"role": turn["role"], "content": f"{merged.pop()['content']}\n\n{turn['content']}".strip()}
        merged.append(turn)
    return merged


def prompt_turns(prompt: str) -> Turns | None:
    """Parse a text prompt that is a transcript ending with an open assistant turn, as in Dahoas/rm-static. Return None
    otherwise.

    It begins with the user's name and ends with the assistant's name or with a user's turn, or its turns are separated as in
    HelpSteer 2. Any other text is one message.
    """
    first, *rest = _HELPSTEER_SPEAKER.split(prompt)
    if rest:
        roles = {"User": "user", "Assistant": "assistant"}
        later = [{"role": roles[name], "content": text} for name, text in zip(rest[::2], rest[1::2], strict=True)]
        return [{"role": "user", "content": first}, *later]
    turns = transcript_turns(prompt)
    if turns is None or turns[0]["role"] != "user":
        return None
    whole = joined(turns)
    if turns[-1] == {"role": "assistant", "content": ""}:
        return whole if whole[-1]["content"] else whole[:-1]
    waits = whole[-1]["role"] == "user" and (len(whole) > 1 or prompt.startswith("\n\n"))
    return whole if waits else None
