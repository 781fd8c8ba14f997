"""The request of a caller: one record, made once, that the log, the wire and every plan carry."""

import sys
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvell.engine.protocol.pooling import Pooling
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.vocabulary import RequestId

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
"""Bytes of a number, by the types that may be sent."""
MOST_DIMENSIONS = 8
TOKEN_BYTES = 4
"""Bytes of a token id in ``RequestSpec.prompt`` and ``Submit.output``."""


class SentTensor(Struct, frozen=True, forbid_unknown_fields=True, weakref=True):
    """One tensor of a model's image processor.

    :param dtype: torch's name of the type, one of ``SIZES``.
    :param data: its numbers, row by row, in little-endian order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def check(self) -> None:
        """Check that the data fit type and shape.

        :raises ChangeSomething: naming the tensor.
        """
        size = SIZES.get(self.dtype)
        fits = len(self.shape) <= MOST_DIMENSIONS and min(self.shape, default=0) >= 0
        if size is None or not fits or prod(self.shape) * size != len(self.data):
            data = f"{self.dtype[:20]} {self.shape[:MOST_DIMENSIONS]} of {len(self.data)} bytes"
            problem = "is not a tensor that can be read"
            raise ChangeSomething(f"images.{self.name[:40]}", data, problem, "send it again")


class RequestSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """One request for one answer, or for one vector.

    :param prompt: token ids as little-endian int32 bytes, so that a long prompt costs one copy.
        Tokens of an image have negative ids, which identify its content.
    :param sampling: parameters of one answer: ``n`` is 1.
    :param cache_salt: name of the prefix-cache root: requests with different salts share no pages.
    :param model: one of several models of an instance; "" is its first.
    :param session: key of requests that share prefixes, for routing; "" for none.
    :param images: (first token, tokens there, image tokens) of each image of the prompt, in order.
    :param tensors: outputs of the model's processor for the images.  The ids of the prompt are then
        the processor's, and the instance fills in ``images``.
    :param priority: requests with lower numbers are admitted first.
    :param pooling: vector of the prompt to return in place of tokens; ``sampling`` is then ignored.
    :param tenant: owner, who takes turns with others; "" on a server without keys.
    :param group: requests that were sent together; the groups of a tenant take turns.
    :raises ChangeSomething: if ``sampling.n`` is not 1, or the prompt is no whole number of tokens.
    """

    request_id: RequestId
    prompt: bytes
    sampling: SamplingParams
    cache_salt: str = ""
    model: str = ""
    session: str = ""
    images: tuple[tuple[int, int, int], ...] = ()
    tensors: tuple[SentTensor, ...] = ()
    priority: int = 0
    pooling: Pooling = ""
    tenant: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        if len(self.prompt) % TOKEN_BYTES:
            raise no_whole_tokens("prompt", self.prompt)
        if self.sampling.n != 1:
            raise ChangeSomething("n", self.sampling.n, "is not 1", "submit each answer on its own")

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @cached_property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Token ids of the prompt, int32 ``[tokens]``, read-only."""
        return to_token_ids(self.prompt)

    @cached_property
    def image_ids(self) -> tuple[int, ...]:
        return tuple(int(self.token_ids[start + tokens - 1]) for start, tokens, _ in self.images)


def no_whole_tokens(name: str, data: bytes) -> ChangeSomething:
    """Return the error of bytes in the field ``name`` that end inside a token id."""
    size = f"{len(data)} bytes"
    return ChangeSomething(name, size, "are not whole tokens", "send 4 bytes per token")


def to_token_ids(data: bytes) -> npt.NDArray[np.int32]:
    """Return little-endian int32 bytes as token ids, without a copy where that is native."""
    ids = np.frombuffer(data, "<i4")
    return ids if sys.byteorder == "little" else ids.astype(np.int32)


def to_token_bytes(token_ids: npt.ArrayLike) -> bytes:
    """Return token ids as little-endian int32 bytes."""
    return np.ascontiguousarray(token_ids, "<i4").tobytes()
