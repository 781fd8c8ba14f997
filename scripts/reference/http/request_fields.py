"""``python -m scripts.reference.http.request_fields``: writes ``docs/request-fields.md`` anew.

One table for each request body: what becomes of every field that OpenAI's and vLLM's have.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

from kvell.equivalents.other import Other
from kvell.server.api.schemas.chat import ChatMessage, ChatRequest
from kvell.server.api.schemas.embeddings import EmbeddingsRequest
from kvell.server.api.schemas.generation import CompletionRequest
from kvell.server.api.schemas.messages.requests import MessagesRequest
from kvell.server.api.schemas.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from kvell.server.api.schemas.request_body import RequestBody
from kvell.server.api.schemas.responses import ResponsesRequest
from scripts.reference.http.fields import field_text

PAGE = Path(__file__).parents[3] / "docs" / "request-fields.md"
BODIES: Mapping[str, type[RequestBody]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/messages": MessagesRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
}
PARTS: Mapping[str, type[BaseModel]] = {
    "`messages` of chat completions": ChatMessage,
    "`messages` of Ollama's chat": OllamaMessage,
    "`options` of Ollama's requests": OllamaOptions,
}
HEAD = """# What becomes of every field of a request

Made from the code by `python -m scripts.reference.http.request_fields`; a test holds it to the
code, to OpenAI's client and to vLLM's fields. `/v1/messages` is Anthropic's, and paths below
`/api` are Ollama's. A field is one of three:

- **honoured**: the answer is as it asks, or the request is refused with the reason;
- **ignored**: any value is taken, and no answer depends on it;
- **refused**: only null and the values named here are taken, since they ask for what happens
  anyway; any other is a 400 that names the field and what to do instead.

A field in no table is ignored, and the log has one line for it (`field_ignored`). Null is always
the default.
"""
_IGNORED = "Accepted and not used"
_ROLE = re.compile(r":\w+:`[~.!]*([^`<]+)(?:\s*<[^`]*>)?`")


def page() -> str:
    """Return the text of the page."""
    sections = [HEAD]
    for title, model in {**{f"`{path}`": one for path, one in BODIES.items()}, **PARTS}.items():
        rows = sorted(_rows(model))
        table = "\n".join(f"| `{name}` | {is_what} | {words} |" for name, is_what, words in rows)
        sections.append(f"\n## {title}\n\n| field | | |\n|---|---|---|\n{table}\n")
    return "".join(sections)


def _rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        shown = field.alias or name
        words = field_text(model.__name__, shown).text
        yield shown, "ignored" if words.startswith(_IGNORED) else "honoured", _markdown(words)
    others: Mapping[str, Other] = getattr(model, "others", {})
    for name, other in others.items():
        if other.why:
            yield name, "ignored", f"{other.why[0].upper()}{other.why[1:]}."
        else:
            yield name, "refused", f"Taken: {_taken(other)}. Instead: {other.remedy}."


def _taken(other: Other) -> str:
    words = {"True": "true", "False": "false"}
    shown = [f"`{words.get(f'{one!r}', f'{one!r}')}`".replace("'", '"') for one in other.values]
    return ", ".join(["null", *shown])


def _markdown(words: str) -> str:
    """A docstring's words in Markdown, on one line."""
    text = _ROLE.sub(r"`\1`", " ".join(words.split())).replace("``", "`")
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
