"""Models and their tokens: ``/v1/models``, ``/version``, ``/tokenize``, ``/detokenize``, …"""

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response

from kvell.errors import ChangeSomething
from kvell.release import RELEASE
from kvell.server.answers.forced import chat_tools
from kvell.server.api.bodies.completions import Body, Lazy, json_response, model_card
from kvell.server.api.door.access_guard import visit_of
from kvell.server.api.http_errors import MODELS
from kvell.server.api.schemas.chat import DetokenizeRequest, TokenizeRequest, checked_ending
from kvell.server.api.serving import AppState, text_bytes


@dataclass(frozen=True)
class ModelsApi:
    """The handlers of models and tokens."""

    serving: AppState
    started_unix_seconds: int
    tells_tokenizer: bool = False

    def install(self, app: FastAPI) -> None:
        app.add_api_route(MODELS, self.models, methods=["GET"])
        app.add_api_route(f"{MODELS}/{{name:path}}", self.model, methods=["GET"])
        app.add_api_route("/version", self.version, methods=["GET"])
        app.add_api_route("/tokenizer_info", self.tokenizer_info, methods=["GET"])
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self.detokenize, methods=["POST"])

    async def models(self) -> Response:
        """List the models that requests may name, and the maximum length of their requests.

        ``chat_template_takes_tools`` is false for a model whose chat template shows no tools, and
        null for a model without a template.
        """
        cards = [self._card(name) for name in self.serving.models_by_name]
        return json_response({"object": "list", "data": cards})

    async def model(self, name: str) -> Response:
        """Describe one model; 404 if it is not served."""
        return json_response(self._card(name))

    def _card(self, name: str) -> Body:
        _, served = self.serving.find_model(name)
        takes_tools = served.text.takes_tools
        return model_card(name, served.length, self.started_unix_seconds, takes_tools)

    async def version(self) -> Response:
        """Return the version of Kvell."""
        return json_response({"version": RELEASE})

    async def tokenizer_info(self) -> Response:
        """Return the settings of the first model's tokenizer, including its chat template.

        The status is 404 unless the server was started with ``--enable-tokenizer-info-endpoint``.
        """
        if not self.tells_tokenizer:
            remedy = "start the server with --enable-tokenizer-info-endpoint"
            raise HTTPException(404, f"the tokenizer's settings are not shown; {remedy}")
        _, served = self.serving.find_model(None)
        return json_response(served.text.tokenizer_info())

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        """Turn a text or a conversation into the token ids that a request would have.

        The answer has ``tokens``, their ``count``, and ``max_model_len``.
        """
        self.serving.note(body)
        _, served = self.serving.find_model(body.model, visit_of(request).tenant)
        if (body.prompt is None) == (body.messages is None):
            remedy = "send one of prompt and messages"
            raise ChangeSomething("prompt", "…", "is not one text or conversation", remedy)
        if body.messages is not None:
            plain = [message.plain() for message in body.messages]
            opens = body.add_generation_prompt
            ids = await served.prompts.chat(
                plain,
                chat_tools(body.tools),
                body.chat_template_kwargs or {},
                opens_answer=opens,
                continues_last=checked_ending(opens, body.continue_final_message),
                fits=False,
            )
        else:
            ids = await served.prompts.text(body.prompt or "", body.add_special_tokens)
        visit_of(request).keep(served.prompts.answers.texts, ids.nbytes)
        sizes: dict[str, Any] = {"count": len(ids), "max_model_len": served.length.reach_tokens}
        token_text = served.text.token_text
        strings = Lazy(token_text(int(token)) for token in ids) if body.return_token_strs else None
        return json_response({**sizes, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        """Turn token ids into text, which the answer has as ``prompt``."""
        self.serving.note(body)
        _, served = self.serving.find_model(body.model, visit_of(request).tenant)
        text = await served.prompts.decode(body.tokens, "tokens")
        visit_of(request).keep(served.prompts.answers.texts, text_bytes(text))
        return json_response({"prompt": text})
