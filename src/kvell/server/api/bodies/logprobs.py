"""How likely tokens were, in OpenAI's two shapes: for chat, and the older one for completions."""

from collections.abc import Sequence
from typing import Any

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.server.text.text_model import TextModel

LEAST_LOGPROB = -9999.0
"""JSON has no infinity; a token that cannot come has this (as in OpenAI's and vLLM's answers)."""


def chat_logprobs(
    model: TextModel, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat answer, or of a piece of it."""
    content = [
        {
            **_chat_token(model, token, told.logprob),
            "top_logprobs": [_chat_token(model, other, one) for other, one in told.top],
        }
        for token, told in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    model: TextModel,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offset_chars: int = 0,
) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion, or of a piece of it.

    :param logprobs: None for the first token of a prompt, which has no probability.
    :param offset_chars: characters of the answer before these tokens.
    """
    tokens = [model.token_text(token) for token in token_ids]
    offsets: list[int] = []
    for text in tokens:
        offsets.append(offset_chars)
        offset_chars += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [one and _finite(one.logprob) for one in logprobs],
        "tokens": tokens,
        "top_logprobs": [one and _top(model, one) for one in logprobs],
    }


def prompt_logprobs_body(
    model: TextModel, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token of the prompt a map from token ids."""
    rest = [
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
    ]
    return [None, *rest]


def _chat_token(model: TextModel, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": model.token_text(token),
        "logprob": _finite(logprob),
        "bytes": list(model.token_bytes(token)),
    }


def _top(model: TextModel, told: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens by their text; of several with one text the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in told.top:
        found.setdefault(model.token_text(token), _finite(logprob))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
