"""Tokens of answers that are still being streamed (vLLM's ``continuous_usage_stats``)."""

from collections.abc import Sequence

from kvell.server.text.text_stream import TextDelta, Usage


class UsageSoFar:
    """A running count of the tokens of several answers.

    :param prompt_tokens: length of each prompt; answers are numbered prompt by prompt.
    :param choices: answers per prompt.
    """

    def __init__(self, prompt_tokens: Sequence[int], choices: int) -> None:
        self._prompt_tokens, self._choices = prompt_tokens, choices
        self._made: dict[int, int] = {}

    def after(self, index: int, delta: TextDelta) -> Usage:
        made = self._made.get(index, 0) + len(delta.token_ids)
        self._made[index] = made
        return Usage(self._prompt_tokens[index // self._choices], made)
