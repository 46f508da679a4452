"""OpenAssistant message trees: prompter turns with several answers, ranked by volunteers, and replies to each answer.

Source: the `.trees.jsonl.gz` files of OpenAssistant/oasst1 and oasst2 (Koepf et al. 2023), whose fields are in
oasst-data/oasst_data/schemas.py of LAION-AI/Open-Assistant; rank 0 is the best sibling.
Messages that were deleted or that reviewers refused (`review_result` false) are left out with all replies below them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from align.data.conversation import Conversation, Message
from align.data.fields import check_list, check_text, field_error, required_field, short_repr
from align.data.records import Demonstration, Prompt, Ranking, Record, evenly_spaced

Node = Mapping[str, Any]
ROLE_NAMES = {"prompter": "user", "assistant": "assistant"}


def is_tree(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("prompt"), Mapping) and "replies" in row["prompt"]


def tree_demonstrations(row: Mapping[str, Any]) -> list[Record]:
    """The conversations in which every answer is the best of its siblings, each assistant turn in exactly one record.

    Of several prompters' replies to one answer, the first (best-ranked) continues the record and each other one starts a
    new record. Unranked siblings have no best: the path ends.
    """
    records: list[Record] = []
    starts: list[tuple[Conversation, Node]] = [((), row["prompt"])] if _usable(row["prompt"]) else []
    while starts:
        before, node = starts.pop(0)
        prompt: Conversation = (*before, _turn(node))
        learned: Conversation = ()
        last: Node | None = None
        while (best := _best_answer(node)) is not None:
            learned, last = (*learned, _turn(best)), best
            replies = _ordered(_replies(best, "prompter"))
            if not replies:
                break
            starts += [((*prompt, *learned), other) for other in replies[1:]]
            node = replies[0]
            learned = (*learned, _turn(node))
        if last is not None:
            while learned[-1]["role"] == "user":  # a prompter's reply without an answer
                learned = learned[:-1]
            records.append(Demonstration(prompt=prompt, continuation=learned, id=last.get("message_id")))
    return records


def tree_rankings(row: Mapping[str, Any]) -> list[Record]:
    """One ranking for each prompter turn with two or more ranked answers; of more than nine, nine evenly spaced by rank."""
    records: list[Record] = []
    for prompt, node in _prompter_nodes((), row["prompt"]):
        ranked = _ordered([reply for reply in _replies(node, "assistant") if _rank(reply) is not None])
        if len(ranked) < 2:
            continue
        kept = [ranked[i] for i in evenly_spaced(len(ranked))]
        responses = tuple(_turn(reply)["content"] for reply in kept)
        ranks = tuple(1 + (_rank(reply) or 0) for reply in kept)
        records.append(Ranking(prompt=prompt, responses=responses, ranks=ranks, id=node.get("message_id")))
    return records


def tree_prompts(row: Mapping[str, Any]) -> list[Record]:
    nodes = _prompter_nodes((), row["prompt"])
    return [Prompt(prompt=prompt, id=node.get("message_id")) for prompt, node in nodes]


def _prompter_nodes(before: Conversation, node: Node) -> Iterator[tuple[Conversation, Node]]:
    if not _usable(node):
        return
    prompt = (*before, _turn(node))
    yield prompt, node
    for answer in _replies(node, "assistant"):
        for reply in _replies(answer, "prompter"):
            yield from _prompter_nodes((*prompt, _turn(answer)), reply)


def _replies(node: Node, role: str) -> list[Node]:
    replies = check_list(node.get("replies") or [], "replies")
    for reply in replies:
        if not isinstance(reply, Mapping) or reply.get("role") != role:
            wrong = f"has {short_repr(reply)} where a message of the {role} belongs"
            raise field_error("replies", wrong, "correct the tree")
    return [reply for reply in replies if _usable(reply)]


def _usable(node: Node) -> bool:
    return not node.get("deleted") and node.get("review_result") is not False


def _turn(node: Node) -> Message:
    role = node.get("role")
    if role not in ROLE_NAMES:
        raise field_error("role", f"is {short_repr(role)}", "use prompter or assistant")
    text = check_text(required_field(node, "text", "every message of a tree has a text"), "text")
    return {"role": ROLE_NAMES[role], "content": text}


def _rank(node: Node) -> int | None:
    rank = node.get("rank")
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 0):
        raise field_error("rank", f"is {short_repr(rank)}", "use a whole number, 0 for the best, or null")
    return rank


def _ordered(nodes: list[Node]) -> list[Node]:
    """Best first, the unranked ones last in their given order."""
    return sorted(nodes, key=lambda node: (_rank(node) is None, _rank(node) or 0))


def _best_answer(node: Node) -> Node | None:
    answers = _ordered(_replies(node, "assistant"))
    if not answers or (len(answers) > 1 and _rank(answers[0]) is None):
        return None
    return answers[0]
