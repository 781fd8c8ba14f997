"""Ollama's routes about models: ``/api/tags``, ``/api/ps``, ``/api/show``, ``/api/pull``, …"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import FastAPI, Response

from kvell.engine.protocol.statistics import InstanceFacts
from kvell.server.api.bodies.ollama_models import VERSION, description, loaded_entry, tag_entry
from kvell.server.api.bodies.pieces import json_response
from kvell.server.api.http_errors import OLLAMA, OLLAMA_DESCRIBED, UnknownModel
from kvell.server.api.routes.ollama import DESCRIBED
from kvell.server.api.schemas.ollama.models import OllamaPullRequest, OllamaShowRequest
from kvell.server.api.serving import AppState
from kvell.server.api.streaming import LINES_TYPE, EventStream, json_line
from kvell.server.api.unknown_paths import AT_THE_START


@dataclass(frozen=True)
class OllamaModelsApi:
    """The handlers of Ollama's lists and descriptions of models."""

    serving: AppState
    started_unix_seconds: int

    def install(self, app: FastAPI) -> None:
        """Add the routes."""
        errors = dict(OLLAMA_DESCRIBED)
        lines = {**DESCRIBED}
        app.add_api_route(f"{OLLAMA}pull", self.on_pull, methods=["POST"], responses=lines)
        app.add_api_route(f"{OLLAMA}show", self.on_show, methods=["POST"], responses=errors)
        gets = (("tags", self.on_tags), ("ps", self.on_ps), ("version", self.on_version))
        for name, getter in gets:
            app.add_api_route(OLLAMA + name, getter, methods=["GET"], responses=errors)

    async def on_tags(self) -> Response:
        """List the models that requests may name.

        ``size`` is that of a model's weight files, ``digest`` is made of its config and of the
        names, sizes and headers of these files, and ``modified_at`` is the time of their last
        change.
        """
        facts, started = self.serving.front.facts, self.started_unix_seconds
        models = self.serving.models_by_name.items()
        return json_response({"models": [tag_entry(*named, facts, started) for named in models]})

    async def on_ps(self) -> Response:
        """List the models that are loaded: all that requests may name.

        ``size`` is the memory of a model's weights and of the KV cache and activations, which
        several models share, in all instances; ``size_vram`` is the part on GPUs.
        """
        instances = self._instances()
        models = self.serving.models_by_name.items()
        started = self.started_unix_seconds
        entries = [loaded_entry(*named, instances, started) for named in models]
        return json_response({"models": entries})

    async def on_show(self, body: OllamaShowRequest) -> Response:
        """Describe a model: its kind, sizes, chat template, context and capabilities."""
        self.serving.note(body)
        named = self.serving.find_model(body.model)
        facts = self.serving.front.facts
        return json_response(description(*named, facts, self.started_unix_seconds))

    async def on_pull(self, body: OllamaPullRequest) -> Response:
        """Answer that a served model is present; the status is 404 for any other model."""
        self.serving.note(body)
        try:
            self.serving.find_model(body.model)
        except UnknownModel as error:
            raise UnknownModel(f"{error}; {AT_THE_START}") from error
        if body.stream:
            return EventStream(_pulled(), LINES_TYPE)
        return json_response({"status": "success"})

    async def on_version(self) -> Response:
        """Return the version of Ollama whose interface is served; ``/version`` has Kvell's."""
        return json_response({"version": VERSION})

    def _instances(self) -> list[InstanceFacts]:
        statuses = (status for status, _ in self.serving.front.instances())
        return [status.report.facts for status in statuses if status.report is not None]


async def _pulled() -> AsyncGenerator[bytes, None]:
    for status in ("pulling manifest", "success"):
        yield json_line({"status": status})
