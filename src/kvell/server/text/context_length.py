"""The longest request: in one instance, and with memory that other instances lend."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class AnswerRoom:
    """The output tokens that may follow a prompt.

    :param usual_tokens: limit of a request without ``max_tokens``.
    :param most_tokens: most tokens of any request; a larger limit is lowered to it.
    """

    usual_tokens: int
    most_tokens: int


@dataclass(frozen=True)
class ContextLength:
    """The limits of prompt and answer together, in tokens.

    :param alone_tokens: limit in the memory of one instance.
    :param reach: returns the current limit with loans, which depends on the number of instances.
    :param model_tokens: limit for any number of instances; 0: ``alone_tokens``.
    """

    alone_tokens: int
    reach: Callable[[], int] | None = None
    model_tokens: int = 0

    @property
    def longest_tokens(self) -> int:
        return max(self.alone_tokens, self.model_tokens)

    @property
    def reach_tokens(self) -> int:
        return self.alone_tokens if self.reach is None else max(self.alone_tokens, self.reach())

    def answer_room(self, prompt_tokens: int) -> AnswerRoom:
        """Return the room after a prompt; the usual answer stays in one instance if possible."""
        alone, most = self.alone_tokens - prompt_tokens, self.reach_tokens - prompt_tokens
        return AnswerRoom(alone if alone > 0 else most, most)
