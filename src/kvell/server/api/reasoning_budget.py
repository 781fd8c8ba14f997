"""``thinking_token_budget``: how many tokens a model may reason."""

from kvell.engine.protocol.structured_outputs import Reasoning, ReasoningBudget
from kvell.errors import ChangeSomething
from kvell.server.answers.named import AnswerFormat
from kvell.server.text.text_model import TextModel

FIELD = "thinking_token_budget"
UNBOUND = -1
TagTokens = tuple[int, int | None]
"""The token that ends reasoning, and the one that begins it; None if the answer begins inside."""


def tag_tokens(
    model: TextModel, answers: AnswerFormat, reasoning: Reasoning | None
) -> TagTokens | None:
    """The tokens of the tags of an answer's reasoning; None if it has none, or no single ones.

    :param answers: how the model writes its answers.
    :param reasoning: what the answer may say first.
    """
    if reasoning is None or not answers.has_thinking_tags:
        return None
    tags = (reasoning.ends[0], reasoning.start)
    ids = [model.encode(tag, add_special_tokens=False).tolist() for tag in tags if tag]
    if any(len(one) != 1 for one in ids):
        return None
    return ids[0][0], ids[1][0] if len(ids) > 1 else None


def reasoning_budget(
    tokens: int | None, answers: AnswerFormat, reasoning: Reasoning | None, tags: TagTokens | None
) -> ReasoningBudget | None:
    """What bounds the reasoning of an answer; None if nothing does.

    :param tokens: that were asked for; None and -1 for no bound.
    :param reasoning: what the answer may say first; None if it can say nothing before its content.
    :param tags: from :func:`tag_tokens`.
    :raises ChangeSomething: if the model marks no reasoning, or not by single tokens.
    """
    if tokens is None or tokens == UNBOUND:
        return None
    if not answers.has_thinking_tags:
        problem = "needs a model that marks its reasoning with tags, which this one does not"
        raise ChangeSomething(FIELD, tokens, problem, "leave it out")
    if reasoning is None:  # the template has ended it already
        return None
    if tags is None:
        problem = "needs a tokenizer in which each tag of reasoning is one token"
        raise ChangeSomething(FIELD, tokens, problem, "leave it out")
    return ReasoningBudget(tokens, *tags)
