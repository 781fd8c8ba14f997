"""How likely a token was, as it travels from an instance to the caller."""

from msgspec import Struct

from kvell.vocabulary import RequestId

MAX_LOGPROBS = 20
"""Most alternatives that a request may ask for at each position (OpenAI's bound)."""


class TokenLogprobs(Struct, frozen=True, gc=False, array_like=True):
    """Natural logarithms of probabilities at one position.

    They are those of the model: of its logits, before penalties, grammar and temperature.

    :param logprob: of the token that stands there.
    :param rank: 1 for the most likely token.
    :param top: the most likely tokens as (token id, logprob), likeliest first; as many as the
        request asked for.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Event: how likely tokens of a request's prompt were, in order.

    The first token of a prompt has no probability, since nothing is before it.

    :param first_index: position in the prompt of the first of them, 1 or more.
    """

    request_id: RequestId
    attempt: int
    first_index: int
    logprobs: tuple[TokenLogprobs, ...]
