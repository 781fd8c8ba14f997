"""The bodies of Ollama's embeddings, and their translation to ``/v1/embeddings``."""

from typing import Annotated

from pydantic import Field

from kvell.server.api.schemas.embeddings import EmbeddingsRequest
from kvell.server.api.schemas.generation import Texts
from kvell.server.api.schemas.ollama.models import OllamaModelBody
from kvell.server.api.schemas.ollama.options import OllamaOptions
from kvell.server.api.schemas.other_fields import OLLAMA_EMBEDDING_OTHERS
from kvell.server.api.schemas.sampling_fields import MAX_INT32


class OllamaEmbedRequest(OllamaModelBody):
    """Body of ``/api/embed``."""

    others = OLLAMA_EMBEDDING_OTHERS

    input: str | Texts = ""
    """A text, or a list of at most 2048; if it is empty, the answer has no vectors."""
    truncate: bool = True
    """Cut a text at its end that is longer than the context; if false, it is refused."""
    dimensions: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    """Length to which vectors are cut, for models that were trained for it; 0 for all numbers."""
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    """Checked as in ``/api/generate``; no vector depends on them."""

    def openai_body(self) -> EmbeddingsRequest:
        """Return the equivalent request to ``/v1/embeddings``."""
        return EmbeddingsRequest(
            model=self.model, input=self.input, dimensions=self.dimensions or None
        )


class OllamaEmbeddingsRequest(OllamaModelBody):
    """Body of ``/api/embeddings``."""

    others = OLLAMA_EMBEDDING_OTHERS

    prompt: str = ""
    """The text; if it is empty, so is the vector."""
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    """Checked as in ``/api/generate``; the vector does not depend on them."""

    def openai_body(self) -> EmbeddingsRequest:
        """Return the equivalent request to ``/v1/embeddings``."""
        return EmbeddingsRequest(model=self.model, input=self.prompt)

    def ollama_name(self, field: str) -> str:
        return "prompt" if field == "input" else field
