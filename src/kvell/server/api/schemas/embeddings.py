"""OpenAI's body of ``/v1/embeddings``, with the extensions that completions have too."""

from abc import ABC, abstractmethod
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import override

from kvell.errors import ChangeSomething
from kvell.server.api.schemas.generation import FAILS_FAST, Texts, texts_or_tokens
from kvell.server.api.schemas.other_fields import others_of
from kvell.server.api.schemas.request_body import RequestPart
from kvell.server.api.schemas.sampling_fields import MAX_INT32, ScheduledRequest, TokenIds

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 1 << 20
"""Maximum tokens of all inputs of one request."""

Encoding = Literal["float", "base64"]


class EmbeddingsRequest(ScheduledRequest):
    """The body of ``/v1/embeddings``."""

    others = others_of("everywhere", "embeddings")

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
        return texts_or_tokens("input", self.input, MAX_INPUTS)


class ScoredRequest(ScheduledRequest, ABC):
    """The fields that both bodies share."""

    others = others_of("everywhere", "scores")

    @abstractmethod
    def texts_by_field(self) -> dict[str, list[str]]:
        """Return the two fields to compare, each with its texts.

        :raises ChangeSomething: if there are no texts, too many, or they form no pairs.
        """

    def to_embeddings(self) -> EmbeddingsRequest:
        """Return the request for the vectors of all texts, in the order of the fields."""
        return EmbeddingsRequest(
            input=[text for texts in self.texts_by_field().values() for text in texts],
            model=self.model,
            cache_salt=self.cache_salt,
            prompt_cache_key=self.prompt_cache_key,
            priority=self.priority,
        )


class ScoreRequest(ScoredRequest):
    """Body of ``/score``: pairs of texts."""

    text_1: str | Texts | None = None
    """A text, or several; one text is compared with each of ``text_2``."""
    text_2: str | Texts | None = None
    """A text, or several: as many as ``text_1`` has if that has several."""
    queries: str | Texts | None = None
    """Another name of ``text_1``."""
    documents: str | Texts | None = None
    """Another name of ``text_2``."""

    @override
    def texts_by_field(self) -> dict[str, list[str]]:
        first, second = self._given("text_1", "queries"), self._given("text_2", "documents")
        given = {name: getattr(self, name) for name in (first, second)}
        by_field = {name: [text] if isinstance(text, str) else text for name, text in given.items()}
        _check(by_field)
        ones, others = by_field.values()
        if len(ones) not in (1, len(others)):
            problem = f"must be one text, or as many as {second}, which has {len(others)}"
            raise ChangeSomething(first, f"{len(ones)} texts", problem, "send pairs, or one text")
        return by_field

    def _given(self, name: str, other: str) -> str:
        given = [field for field in (name, other) if getattr(self, field) is not None]
        if len(given) == 1:
            return given[0]
        problem = f"is {'missing' if not given else 'given twice'}: it is {other} too"
        raise ChangeSomething(name, "…" if given else "null", problem, "give one of them")


class RerankDocument(RequestPart):
    """A document as an object."""

    text: str
    """Text of the document."""


Documents = Annotated[list[str | RerankDocument], FAILS_FAST]


class RerankRequest(ScoredRequest):
    """Body of ``/rerank``: a query, and documents to sort."""

    query: str
    """Text that the documents are compared with."""
    documents: Documents
    """Texts, or objects with a ``text``; at most 2,047."""
    top_n: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    """Number of the best documents to return; all if 0 or null."""
    return_documents: bool | None = None
    """Whether results contain their documents; true if null."""

    @override
    def texts_by_field(self) -> dict[str, list[str]]:
        texts = [
            document if isinstance(document, str) else document.text for document in self.documents
        ]
        by_field = {"query": [self.query], "documents": texts}
        _check(by_field)
        return by_field


def _check(by_field: dict[str, list[str]]) -> None:
    left = MAX_INPUTS
    for field, texts in by_field.items():
        if not 1 <= len(texts) <= left:
            value = f"{len(texts)} texts"
            raise ChangeSomething(field, value, "is out of range", f"send 1 to {left}")
        left -= len(texts)
