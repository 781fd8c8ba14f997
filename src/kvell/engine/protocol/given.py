"""Conversion of users' values to the type of a field, and of users' prompts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from kvell.equivalents.other import show
from kvell.errors import ChangeSomething

MAX_TOKEN_ID = 2**31 - 1


def whole(field: str, value: Any) -> int:
    """Return a whole number.

    :raises ChangeSomething: if the value is anything else, also a bool or 1.5.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong(field, value, "is not a whole number", "give one like 8")
    return int(value)


def number(field: str, value: Any) -> float:
    """Return a number.

    :raises ChangeSomething: if the value is anything else, also a bool.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong(field, value, "is not a number", "give one like 0.5")
    return float(value)


def flag(field: str, value: Any) -> bool:
    """Return a bool.

    :raises ChangeSomething: if the value is anything else.
    """
    if not isinstance(value, bool):
        raise _wrong(field, value, "is neither true nor false", "give True or False")
    return value


def text(field: str, value: object) -> str:
    """Return a text.

    :raises ChangeSomething: if the value is anything else.
    """
    if not isinstance(value, str):
        raise _wrong(field, value, "is not text", 'give one like "a|b"')
    return value


def texts(field: str, value: Any) -> tuple[str, ...]:
    """Return texts: of a list or tuple, or a single text; none for None.

    :raises ChangeSomething: if the value is anything else.
    """
    if value is None:
        return ()
    many = (value,) if isinstance(value, str) else value
    if not isinstance(many, list | tuple) or not all(isinstance(item, str) for item in many):
        raise _wrong(field, value, "is neither a text nor a list of texts", 'give one like ["."]')
    return tuple(many)


def token_ids(field: str, value: Any) -> tuple[int, ...]:
    """Return token ids: of a list, a tuple, a set or an array; none for None.

    :raises ChangeSomething: if the value is anything else.
    """
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _wrong(field, value, "is not a list of token ids", "give one like [2, 7]")
    return tuple(whole(field, token_id) for token_id in value)


def biases(field: str, value: Any) -> dict[int, float]:
    """Return numbers by token id; an id may be a text of digits, as in JSON.

    :raises ChangeSomething: if the value is anything else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(field, value, "is not a mapping from token ids to numbers", "give {504: 1.5}")
    numbers: dict[int, float] = {}
    for token, bias in value.items():
        is_written = isinstance(token, str) and token.isascii() and token.isdigit()
        numbers[whole(field, int(token) if is_written else token)] = number(field, bias)
    return numbers


@dataclass(frozen=True)
class GivenPrompt:
    """A caller's prompt.

    :param text: None if the prompt has only token ids.
    :param token_ids: int32 [tokens]; None if the text must be tokenized.
    :param model: name of one of several models; "" for the first.
    :param images: tensors of the model's processor, by name.
    """

    text: str | None
    token_ids: npt.NDArray[np.int32] | None = None
    model: str = ""
    images: Mapping[str, Any] | None = None


def given_prompt(prompt: object, *extra: str) -> GivenPrompt:
    """Read a caller's prompt: a text, token ids, or a mapping that has either.

    :param extra: further keys that a mapping may have.
    :raises ChangeSomething: if the prompt is anything else.
    """
    if isinstance(prompt, str):
        return GivenPrompt(prompt)
    if not isinstance(prompt, Mapping):
        return GivenPrompt(None, prompt_token_ids("prompt", prompt))
    for name, value in prompt.items():
        if value is not None and name not in ("prompt", "prompt_token_ids", "model", *extra):
            raise _wrong(str(name), value, "is not a field of a prompt", "leave it out")
    model = prompt.get("model") or ""
    images = prompt.get("images")
    if not isinstance(model, str):
        raise _wrong("model", model, "is not text", "give the name of a model that is served")
    if images is not None and not isinstance(images, Mapping):
        remedy = "give the tensors that the model's processor makes, by name"
        raise _wrong("images", type(images).__name__, "are not a mapping", remedy)
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        remedy = "give prompt or prompt_token_ids"
        raise _wrong("prompt", sorted(map(str, prompt)), "has no text and no tokens", remedy)
    if ids is not None:
        known_text = text if isinstance(text, str) else None
        return GivenPrompt(known_text, prompt_token_ids("prompt_token_ids", ids), model, images)
    if isinstance(text, str):
        return GivenPrompt(text, None, model, images)
    return GivenPrompt(None, prompt_token_ids("prompt", text), model, images)


def prompt_token_ids(field: str, value: object) -> npt.NDArray[np.int32]:
    """Read a prompt's token ids, int32 [tokens]: a list, a tuple, an array or a tensor.

    :raises ChangeSomething: if the value is anything else, or a number is not a token id.
    """
    remedy = "give a text, or a list of token ids like [2, 7] as one of several prompts"
    if isinstance(value, list | tuple):
        if set(map(type, value)) - {int}:
            value = [whole(field, token_id) for token_id in value]
        if value and not 0 <= min(value) <= max(value) <= MAX_TOKEN_ID:
            wrong = next(token_id for token_id in value if not 0 <= token_id <= MAX_TOKEN_ID)
            raise _wrong(field, wrong, "is not a token id", "use ids of the model's vocabulary")
        return np.array(value, np.int32)
    if isinstance(value, bytes) or not hasattr(value, "__array__"):
        raise _wrong(field, value, "is not a prompt", remedy)
    ids = np.asarray(value)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise _wrong(field, f"{ids.dtype} {list(ids.shape)}", "are not token ids", remedy)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= MAX_TOKEN_ID:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise _wrong(field, wrong, "is not a token id", "use ids of the model's vocabulary")
    return ids.astype(np.int32)


def _wrong(field: str, value: object, problem: str, remedy: str) -> ChangeSomething:
    return ChangeSomething(field, show(value), problem, remedy)
