"""How likely tokens were, in OpenAI's two shapes: for chat, and the older one for completions.

A token that is a part of a character is written by its bytes: ``\\xf0\\x9f`` in chat, and
``bytes:\\xf0\\x9f`` in completions.  The token that stands at a place is always among its likeliest
ones: in completions beside those asked for, in chat in the place of the least likely of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.server.api.bodies.pieces import Lazy
from kvell.server.text.text_model import TextModel

LEAST_LOGPROB = -9999.0
"""JSON has no infinity; a token that cannot come has this (as in OpenAI's and vLLM's answers)."""


def chat_logprobs(
    model: TextModel, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, object]:
    """``choices[].logprobs`` of a chat answer, or of a piece of it."""
    content = chat_tokens(model, token_ids, logprobs)
    return {"content": Lazy(content), "refusal": None}


def chat_tokens(
    model: TextModel, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> Iterator[dict[str, object]]:
    """Its ``content``, token by token."""
    for token, told in zip(token_ids, logprobs, strict=True):
        likely = _with_own(token, told, more=0)
        top = [_chat_token(model, other, one) for other, one in likely]
        yield {**_chat_token(model, token, told.logprob), "top_logprobs": top}


def completion_logprobs(
    model: TextModel,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: Iterable[int],
) -> dict[str, object]:
    """``choices[].logprobs`` of a completion, or of a piece of it.

    :param logprobs: None for the first token of a prompt, which has no probability.
    :param offsets: where each token's text begins in the answer's, in characters.
    """
    return {
        "text_offset": Lazy(offsets),
        "token_logprobs": Lazy(one and _finite(one.logprob) for one in logprobs),
        "tokens": Lazy(_completion_token(model, token) for token in token_ids),
        "top_logprobs": Lazy(
            one and _by_text(model, _with_own(token, one, more=1))
            for token, one in zip(token_ids, logprobs, strict=True)
        ),
    }


def prompt_logprobs_body(
    model: TextModel, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> Lazy:
    """vLLM's ``prompt_logprobs``: for each token of the prompt a map from token ids."""
    rest = (
        {
            str(one): {
                "logprob": _finite(value),
                "rank": told.rank if one == token else rank,
                "decoded_token": model.token_text(one),
            }
            for rank, (one, value) in enumerate(
                dict([*told.top, (token, told.logprob)]).items(), start=1
            )
        }
        for token, told in zip(token_ids[1:], logprobs, strict=False)
    )
    return Lazy(chain([None], rest))


def _chat_token(model: TextModel, token: int, logprob: float) -> dict[str, object]:
    data = model.token_bytes(token)
    return {
        "token": model.token_text(token) if _is_text(data) else _escaped(data),
        "logprob": _finite(logprob),
        "bytes": list(data),
    }


def _completion_token(model: TextModel, token: int) -> str:
    data = model.token_bytes(token)
    return model.token_text(token) if _is_text(data) else f"bytes:{_escaped(data)}"


def _with_own(token: int, told: TokenLogprobs, *, more: int) -> list[tuple[int, float]]:
    """The likeliest tokens and the one that stands there, which is always among them.

    :param more: how many there may be beyond those asked for; it takes the last's place else.
    """
    if any(other == token for other, _ in told.top) or not len(told.top) + more:
        return list(told.top)
    return [*told.top[: len(told.top) - 1 + more], (token, told.logprob)]


def _by_text(model: TextModel, likely: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Tokens by their text; of several with one text the likelier has it, the others their ids."""
    found: dict[str, float] = {}
    for token, logprob in likely:
        text = _completion_token(model, token)
        found[f"token_id:{token}" if text in found else text] = _finite(logprob)
    return found


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _escaped(data: bytes) -> str:
    """Bytes that form no character, as OpenAI writes them."""
    return "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
