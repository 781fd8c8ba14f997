"""``thinking_token_budget``: the limit of reasoning tokens."""

from typing import NamedTuple

from kvell.engine.protocol.structured_outputs import Reasoning, ReasoningBudget
from kvell.errors import ChangeSomething
from kvell.server.answers.named import AnswerFormat
from kvell.server.text.text_model import TextModel

FIELD = "thinking_token_budget"
UNBOUND = -1


class TagTokens(NamedTuple):
    """The tokens of the tags of reasoning.

    :param end: ends it.
    :param start: begins it; None if the answer begins inside it.
    :param calls: begin a call, which ends it too.
    """

    end: int
    start: int | None
    calls: tuple[int, ...] = ()


def tag_tokens(
    model: TextModel, answers: AnswerFormat, reasoning: Reasoning | None, *, may_call: bool
) -> TagTokens | None:
    """Return the tokens of the reasoning tags; None if there are no tags, or one is several tokens.

    :param reasoning: None if no reasoning can precede the content.
    :param may_call: whether a call may end the reasoning.
    """
    if reasoning is None or not answers.has_thinking_tags:
        return None
    tags = (reasoning.ends[0], reasoning.start)
    ids = [model.encode(tag, add_special_tokens=False).tolist() for tag in tags if tag]
    if any(len(tag_ids) != 1 for tag_ids in ids):
        return None
    starts = answers.call_starts() if may_call else ()
    calls = [model.encode(start, add_special_tokens=False).tolist() for start in starts]
    single = tuple(each[0] for each in calls if len(each) == 1)
    return TagTokens(ids[0][0], ids[1][0] if len(ids) > 1 else None, single)


def reasoning_budget(
    tokens: int | None, answers: AnswerFormat, reasoning: Reasoning | None, tags: TagTokens | None
) -> ReasoningBudget | None:
    """Return the limit of an answer's reasoning; None if there is no limit.

    :param tokens: the requested limit; None and -1 mean no limit.
    :param reasoning: None if no reasoning can precede the content.
    :param tags: from :func:`tag_tokens`.
    :raises ChangeSomething: if the model has no reasoning tags, or a tag is several tokens.
    """
    if tokens is None or tokens == UNBOUND:
        return None
    if not answers.has_thinking_tags:
        problem = "needs a model that marks its reasoning with tags, which this one does not"
        raise ChangeSomething(FIELD, tokens, problem, "leave it out")
    if reasoning is None:  # the template has already ended it
        return None
    if tags is None:
        problem = "needs a tokenizer in which each tag of reasoning is one token"
        raise ChangeSomething(FIELD, tokens, problem, "leave it out")
    return ReasoningBudget(tokens, *tags)
