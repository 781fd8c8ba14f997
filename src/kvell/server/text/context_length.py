"""How long a request may be: in one instance, and with memory that others lend."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class AnswerRoom:
    """Output tokens behind a prompt.

    :param usual_tokens: where a request does not say how many it wants.
    :param most_tokens: that it may ask for.
    :param prompt_tokens: of the prompt.
    """

    usual_tokens: int
    most_tokens: int
    prompt_tokens: int = 0


@dataclass(frozen=True)
class ContextLength:
    """Tokens of prompt and answer together.

    :param alone_tokens: at most, in the memory of one instance.
    :param reach: returns the most while others lend it memory; it follows how many there are.
    :param model_tokens: that no number of them exceeds; 0: the former.
    """

    alone_tokens: int
    reach: Callable[[], int] | None = None
    model_tokens: int = 0

    @property
    def longest_tokens(self) -> int:
        """Most tokens that a request can ever have, however many instances there will be."""
        return max(self.alone_tokens, self.model_tokens)

    @property
    def reach_tokens(self) -> int:
        """Most tokens of a request, while others lend what they can."""
        return self.alone_tokens if self.reach is None else max(self.alone_tokens, self.reach())

    def answer_room(self, prompt_tokens: int) -> AnswerRoom:
        """Return the room that a prompt leaves; without further words it stays in one instance."""
        alone, most = self.alone_tokens - prompt_tokens, self.reach_tokens - prompt_tokens
        return AnswerRoom(alone if alone > 0 else most, most, prompt_tokens)
