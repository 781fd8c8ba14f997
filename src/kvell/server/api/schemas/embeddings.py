"""OpenAI's body of ``/v1/embeddings``, with the extensions that completions have too."""

from typing import Annotated, Literal

from pydantic import Field

from kvell.errors import ChangeSomething
from kvell.server.api.schemas.generation import FAILS_FAST, Texts
from kvell.server.api.schemas.other_fields import EMBEDDING_OTHERS
from kvell.server.api.schemas.sampling_fields import MAX_INT32, ScheduledRequest, TokenIds

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 1 << 20
"""Maximum tokens of all inputs of one request."""

Encoding = Literal["float", "base64"]


class EmbeddingsRequest(ScheduledRequest):
    """The body of ``/v1/embeddings``."""

    others = EMBEDDING_OTHERS

    input: str | TokenIds | Annotated[list[TokenIds], FAILS_FAST] | Texts
    """A text or token ids, or a list of either: at most 2048 of them."""
    encoding_format: Encoding | None = None
    """How a vector is written: ``float`` numbers, or ``base64`` of little-endian float32."""
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Length to which vectors are cut, for models that were trained for it."""

    def inputs(self) -> list[str | list[int]]:
        """Return the inputs, each as text or token ids.

        :raises ChangeSomething: if there are none or too many.
        """
        given = self.input
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [[token for token in given if isinstance(token, int)]]
        if not 1 <= len(given) <= MAX_INPUTS:
            remedy = f"send 1 to {MAX_INPUTS}"
            raise ChangeSomething("input", f"{len(given)} inputs", "is out of range", remedy)
        return [each for each in given if not isinstance(each, int)]

    def encoding(self) -> Encoding:
        return self.encoding_format or "float"
