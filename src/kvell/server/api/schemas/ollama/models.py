"""The bodies of Ollama's requests about models, and the field that names the model."""

from pydantic import model_validator

from kvell.server.api.schemas.other_fields import PULL_OTHERS, SHOW_OTHERS
from kvell.server.api.schemas.request_body import RequestBody


class OllamaModelBody(RequestBody):
    """A body that names a model; ``name`` is the older spelling of ``model``."""

    model: str
    """Name of a served model, alone or with the tag ``latest`` or that of its size, as in
    ``smollm2:135m``; ``name`` is the same."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: object) -> object:
        if isinstance(data, dict) and "name" in data:
            data = dict(data)
            name = data.pop("name")
            data["model"] = data.get("model") or name
        return data


class OllamaShowRequest(OllamaModelBody):
    """Body of ``/api/show``."""

    others = SHOW_OTHERS


class OllamaPullRequest(OllamaModelBody):
    """Body of ``/api/pull``."""

    others = PULL_OTHERS

    stream: bool = True
    """Send a line of JSON for each step."""
