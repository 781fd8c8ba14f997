"""The ASGI app: OpenAI's API, Anthropic's messages, Ollama's API, and routes for operators."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from kvell.device.available import process_bytes
from kvell.front.front import Front
from kvell.release import RELEASE
from kvell.server.access.bodies import BodyBounds
from kvell.server.answers.named import NONE, default_parsers, parser_named
from kvell.server.api import http_errors
from kvell.server.api.door.access_guard import (
    Access,
    AccessGuard,
    BrowserRules,
    HeadAsGet,
    install_browsers,
)
from kvell.server.api.door.face_options import FaceOptions, checked_root_path
from kvell.server.api.door.guards import BodyLimit, LongBodyRoute, ServedLimit
from kvell.server.api.door.http_bounds import DEFAULT, HttpBounds
from kvell.server.api.http_errors import served_path
from kvell.server.api.prompts import PromptEncoder
from kvell.server.api.routes.chat import ChatApi
from kvell.server.api.routes.cluster import ClusterApi
from kvell.server.api.routes.completions import CompletionsApi
from kvell.server.api.routes.docs import PATH as DOCS_PATH
from kvell.server.api.routes.docs import DocsApi
from kvell.server.api.routes.embeddings import PATH as EMBEDDINGS_PATH
from kvell.server.api.routes.embeddings import RERANK_PATHS, SCORE_PATHS, EmbeddingsApi, ScoresApi
from kvell.server.api.routes.messages import MessagesApi
from kvell.server.api.routes.models import ModelsApi
from kvell.server.api.routes.ollama import OllamaAnswersApi, OllamaModelsApi
from kvell.server.api.routes.operator import OperatorApi
from kvell.server.api.routes.responses import ResponsesApi
from kvell.server.api.schemas.embeddings import MAX_INPUT_TOKENS, MAX_INPUTS
from kvell.server.api.serve_options import MAX_BODY_BYTES
from kvell.server.api.serving import AppState, ServerModel
from kvell.server.logs.lines import tell
from kvell.server.map.map_api import MapApi, ServerFacts
from kvell.server.map.recorder import HistoryRecorder
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.server.text.lanes import TextWork, most_work_bytes
from kvell.server.text.text_bounds import ContextLength
from kvell.server.text.text_model import TextModel

_SCORED = ("text_1", "text_2", "queries", "documents")
_BOUNDS_BY_PATH = {
    EMBEDDINGS_PATH: BodyBounds(elements_by_field={"input": MAX_INPUT_TOKENS + 2 * MAX_INPUTS}),
    **dict.fromkeys(
        (*SCORE_PATHS, *RERANK_PATHS),
        BodyBounds(elements_by_field=dict.fromkeys(_SCORED, 4 * MAX_INPUTS)),
    ),
}
"""Bounds of paths where ``input`` may be token ids, and documents may be objects."""

UNCHANGED = FaceOptions()
NO_PARSER = "give --tool-call-parser, or none to return calls as text"
logger = logging.getLogger(__name__)


def build_app(
    front: Front,
    model: TextModel,
    metrics: ServerMetrics,
    *,
    access: Access | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    http: HttpBounds = DEFAULT,
    beside: Sequence[TextModel] = (),
    floor_bytes: int = 0,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    face: FaceOptions = UNCHANGED,
    recorder: HistoryRecorder | None = None,
) -> FastAPI:
    """Return the ASGI app of a started front.

    :param model: the instance's first model; ``beside`` has the others.
    :param access: keys and rights; by default every request is allowed.
    :param http: limits of the requests that await answers, and of the time for a body.
    :param floor_bytes: memory of this process before it loaded anything; 0 uses its present size.
    :param tool_call_parser: format of the first model's calls; None: by its type and chat template.
        The same for ``reasoning_parser``.
    :param face: names of the first model, and options for browsers and proxies.
    :param recorder: records the memory map's history; None: an own one, only while the map is open.
    """
    facts = front.facts
    work = TextWork()
    first = _served(model, "", _length(front, ""), work, tool_call_parser, reasoning_parser)
    others = [_served(other, other.name, _length(front, other.name), work) for other in beside]
    aliases = dict.fromkeys(face.served_names, first)
    models = aliases | {served.text.name: served for served in (first, *others)}
    serving = AppState(front, models, metrics)
    floor_bytes = floor_bytes or process_bytes()
    work_bytes = most_work_bytes(facts, model, beside)
    app = _empty_app(face)
    for api in (CompletionsApi, ChatApi, ResponsesApi, MessagesApi, OllamaAnswersApi):
        api(serving).install(app)
    EmbeddingsApi(serving).install(app)
    ScoresApi(serving).install(app)
    started_unix_seconds = int(time.time())
    ModelsApi(serving, started_unix_seconds, face.tells_tokenizer).install(app)
    OllamaModelsApi(serving, started_unix_seconds).install(app)
    OperatorApi(front, metrics, floor_bytes, work_bytes).install(app)
    cluster = ClusterApi(front, floor_bytes + work_bytes, os.getpid())
    cluster.install(app)
    access = access or Access()
    names = tuple(metrics.model_name.split(","))
    shown = ServerFacts(names, cluster.contract_bytes, _open_links(access, face))
    MapApi(front, recorder or HistoryRecorder(front, metrics), shown).install(app)
    shown_at = () if face.hides_docs else (DOCS_PATH,)
    http_errors.install(app, metrics.on_rejected, (*shown_at, http_errors.MODELS))
    browsers = BrowserRules(face.allowed_hosts, face.cross_origin.origins)
    _install_door(app, metrics, access, max_body_bytes, http, browsers, work)
    install_browsers(app, face)
    return app


def _open_links(access: Access, face: FaceOptions) -> tuple[str, ...]:
    """Return the pages without a key, to which the memory map links."""
    needs_key = not access.keys.is_empty and access.guards_metrics
    metrics = () if needs_key else ("metrics",)
    return (*metrics, *(() if face.hides_docs else (DOCS_PATH.strip("/"),)))


def _empty_app(face: FaceOptions) -> FastAPI:
    """Return an app without routes of the API, but for its description unless that is hidden."""
    app = FastAPI(
        title="Kvell",
        version=RELEASE,
        openapi_url=None,  # FastAPI's route writes the document again for each request
        docs_url=None,  # its page loads its scripts from another server
        redoc_url=None,
        responses=dict(http_errors.DESCRIBED),
    )
    app.router.route_class = LongBodyRoute
    if not face.hides_docs:
        DocsApi(app, checked_root_path(face.root_path)).install()
    return app


def _install_door(
    app: FastAPI,
    metrics: ServerMetrics,
    access: Access,
    max_body_bytes: int,
    http: HttpBounds,
    browsers: BrowserRules,
    work: TextWork,
) -> None:
    """Add the middleware that may refuse a request; the last one added runs first."""
    app.add_middleware(HeadAsGet)
    app.add_middleware(ServedLimit, most=http.most_served, rejected=metrics.on_rejected)
    app.add_middleware(
        BodyLimit,
        max_body_bytes=max_body_bytes,
        rejected=metrics.on_rejected,
        bounds=BodyBounds(),
        by_path=_BOUNDS_BY_PATH,
        http=http,
        reads=_reads_body(app),
        work=work,
    )
    app.add_middleware(AccessGuard, access=access, rejected=metrics.on_rejected, browsers=browsers)


def _reads_body(app: FastAPI) -> Callable[[Scope], bool]:
    """Return a predicate of requests that a route takes, so that their bodies are read."""
    posts = {
        route.path
        for route in app.routes
        if isinstance(route, APIRoute) and "POST" in (route.methods or ())
    }

    def is_taken(scope: Scope) -> bool:
        if scope["method"] == "POST" and served_path(scope) in posts:  # nearly all requests
            return True
        return any(route.matches(scope)[0] is Match.FULL for route in app.routes)

    return is_taken


def _length(front: Front, model: str) -> ContextLength:
    lengths = front.facts.lengths(model)
    reach = partial(front.reach_tokens, model)
    return ContextLength(lengths.max_model_len, reach, lengths.longest_tokens)


def _served(
    text: TextModel,
    key: str,
    length: ContextLength,
    work: TextWork,
    tool: str | None = None,
    reasoning: str | None = None,
) -> ServerModel:
    default_tool, default_reasoning = default_parsers(text.model_type, text.chat_template)
    if tool is None and default_tool == NONE and "tools" in text.chat_template:
        tell(logger, logging.WARNING, "no_tool_parser", model=text.name, remedy=NO_PARSER)
    answers = parser_named(
        default_tool if tool is None else tool,
        default_reasoning if reasoning is None else reasoning,
    )
    return ServerModel(text, PromptEncoder(text, length, work), key, length, answers)
