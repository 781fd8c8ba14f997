"""The bodies of Ollama's requests, and their translation to chat and text completions."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from kvell.engine.protocol.logprobs import MAX_LOGPROBS
from kvell.engine.protocol.schemas.references import Schema
from kvell.errors import ChangeSomething
from kvell.server.api.schemas.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ImagePart,
    ImageUrl,
    Part,
    TextPart,
    ToolCallMessage,
)
from kvell.server.api.schemas.embeddings import EmbeddingsRequest
from kvell.server.api.schemas.formats import ResponseFormat, schema_format
from kvell.server.api.schemas.generation import CompletionRequest, Texts
from kvell.server.api.schemas.other_fields import names_of, others_of
from kvell.server.api.schemas.request_body import RequestBody, RequestPart
from kvell.server.api.schemas.sampling_fields import (
    MAX_INT32,
    RepetitionPenalty,
    StopText,
    StopTexts,
)
from kvell.wire.json_text import write_json

Tokens = Annotated[int, Field(ge=-2, le=MAX_INT32)]
SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
"""Options with the same name in chat and text completions."""
LAST_TOKENS = 64
"""Ollama's default of ``repeat_last_n``."""


class OllamaOptions(RequestPart):
    """The field ``options``; null means the model's own recommendation, or no limit."""

    others = others_of("ollama_options")
    place = "options."

    num_predict: Tokens | None = None
    """Maximum output tokens; as many as fit if null, 0, -1 or -2."""
    temperature: float | None = None
    """0 chooses the likeliest token."""
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    top_p: float | None = None
    """Keep the smallest set of tokens whose probability reaches it."""
    min_p: float | None = None
    """Drop tokens below this fraction of the likeliest token's probability."""
    seed: int | None = None
    """With a seed, the same request has the same answer; -1 or null draws a seed, at random or from
    the server's ``--seed``."""
    stop: StopText | StopTexts | None = None
    """The answer ends before the first of these texts."""
    repeat_penalty: RepetitionPenalty | None = None
    """Divides the positive logits of tokens in prompt and output; 1 for no penalty."""
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    """Penalties look at this number of last tokens; -1 for all, 0 for no penalties; 64 if null and
    the options have a penalty."""
    presence_penalty: float | None = None
    """Is subtracted from the logits of all tokens in the output."""
    frequency_penalty: float | None = None
    """Is subtracted from a token's logit once for each time that the output has it."""
    num_ctx: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    """Needed tokens of prompt and answer: the context is the served one, whatever it is; the log
    has one line for each number above it."""

    def excess_context(self, context_tokens: int) -> set[str]:
        needed = self.num_ctx or 0
        return {f"{needed} (served: {context_tokens})"} if needed > context_tokens else set()

    def sampling_fields(self) -> dict[str, object]:
        limit = self.num_predict
        return {
            **{name: getattr(self, name) for name in (*SAME, "seed", "stop")},
            "repetition_penalty": self.repeat_penalty,
            "repeat_last_n": self._window(),
            "max_tokens": None if limit is not None and limit <= 0 else limit,
        }

    def _window(self) -> int | None:
        """Return the number of last tokens at which penalties look; None for the model's own."""
        penalties = self.repeat_penalty, self.presence_penalty, self.frequency_penalty
        if self.repeat_last_n is None and any(penalty is not None for penalty in penalties):
            return LAST_TOKENS
        return self.repeat_last_n


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

    others = others_of("ollama_show")


class OllamaPullRequest(OllamaModelBody):
    """Body of ``/api/pull``."""

    others = others_of("ollama_pull")

    stream: bool = True
    """Send a line of JSON for each step."""


Images = Annotated[list[str], Field(max_length=MAX_PARTS, fail_fast=True)]
Think = bool | Literal["low", "medium", "high"]
_IMAGE_STARTS = {"/9j/": "jpeg", "R0lG": "gif", "UklG": "webp"}
"""Kinds of images by the beginning of their base64; others are sent as PNG."""


class OllamaFunction(RequestPart):
    """A function that an earlier answer called."""

    name: str = Field(max_length=256)
    """Name of the function."""
    arguments: Schema = Field(default_factory=dict)
    """Its arguments."""


class OllamaToolCall(RequestPart):
    """A call in an earlier answer."""

    function: OllamaFunction
    """The called function."""


class OllamaMessage(RequestPart):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    """Author of the message."""
    content: str = ""
    """The text."""
    thinking: str | None = None
    """Thinking before this answer, for chat templates that show it."""
    images: Images | None = None
    """Files of images in base64, after the text."""
    tool_calls: (
        Annotated[list[OllamaToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None
    ) = None
    """Calls in this answer."""
    tool_name: str | None = Field(default=None, max_length=256)
    """With the role ``tool``: name of the function whose result this is."""
    tool_call_id: str | None = Field(default=None, max_length=256)
    """With the role ``tool``: id of the call whose result this is."""

    def message(self) -> ChatMessage:
        calls = [
            ToolCallMessage(
                function=CalledFunction(
                    name=call.function.name, arguments=write_json(call.function.arguments)
                )
            )
            for call in self.tool_calls or ()
        ]
        return ChatMessage(
            role=self.role,
            content=with_images(self.content, self.images),
            reasoning_content=self.thinking,
            tool_calls=calls or None,
            name=self.tool_name,
            tool_call_id=self.tool_call_id,
        )


class OllamaRequest(OllamaModelBody):
    """The fields that ``/api/chat`` and ``/api/generate`` share."""

    names = names_of("ollama")

    stream: bool = True
    """Send the answer piece by piece, each a line of JSON."""
    format: Literal["", "json"] | Schema | None = None
    """``"json"`` for any JSON object, or the schema that the text follows."""
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    """Options of sampling and of lengths."""
    think: Think | None = None
    """Whether the model thinks before it answers, or how hard; the chat template decides if null.

    The template receives it as ``enable_thinking`` and as ``thinking``, and a text as
    ``reasoning_effort``, too.
    """

    logprobs: bool | None = None
    """Return the log probability of each token of the answer."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return this many likeliest tokens too; implies ``logprobs`` if that is null."""

    def likely_tokens(self) -> int | None:
        """Return the number of likeliest tokens at each token; None for no log probabilities.

        :raises ChangeSomething: if ``top_logprobs`` is set and ``logprobs`` is false.
        """
        if self.top_logprobs and self.logprobs is False:
            problem, remedy = "needs logprobs", "set logprobs to true"
            raise ChangeSomething("top_logprobs", self.top_logprobs, problem, remedy)
        return self.top_logprobs or 0 if self.logprobs or self.top_logprobs else None

    def _shared_fields(self) -> dict[str, object]:
        form: ResponseFormat | None = None
        if self.format == "json":
            form = ResponseFormat(type="json_object")
        elif isinstance(self.format, dict):
            form = schema_format(self.format)
        return {"stream": self.stream, "response_format": form, **self.options.sampling_fields()}

    def _chat(self, messages: list[ChatMessage], **more: object) -> ChatRequest:
        fields = self._shared_fields()
        likely = self.likely_tokens()
        if likely is not None:
            more |= {"logprobs": True, "top_logprobs": likely}
        if self.think is not None:
            is_on = self.think is not False
            more["chat_template_kwargs"] = {"enable_thinking": is_on, "thinking": is_on}
            more["reasoning_effort"] = self.think if isinstance(self.think, str) else None
        return ChatRequest.model_validate({**fields, "messages": messages, **more})


class OllamaChatRequest(OllamaRequest):
    """Body of ``/api/chat``."""

    others = others_of("ollama", "ollama_chat")

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] = (
        Field(default_factory=list)
    )
    """The conversation so far, oldest first; without any, the answer only says that the model is
    loaded."""
    tools: Annotated[list[Schema], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that may be called: ``{"type": "function", "function": {"name": …}}``."""

    def has_prompt(self) -> bool:
        return bool(self.messages)

    def chat(self) -> ChatRequest:
        return self._chat([message.message() for message in self.messages], tools=self.tools)


class OllamaGenerateRequest(OllamaRequest):
    """Body of ``/api/generate``."""

    others = others_of("ollama", "ollama_generate")

    prompt: str = ""
    """The text to answer; if it is empty, the answer only says that the model is loaded."""
    suffix: str = ""
    """The text after the answer, for models whose tokenizer has fill-in-the-middle tokens; the chat
    template is not used then."""
    system: str = ""
    """A system message before the prompt."""
    images: Images | None = None
    """Files of images in base64, after the text."""
    raw: bool = False
    """Whether the answer continues the prompt as it is, without the chat template."""

    def has_prompt(self) -> bool:
        return bool(self.prompt or self.images or self.suffix)

    def continues(self, chat_template: str) -> bool:
        """Return whether the answer continues the prompt, or ends before the suffix.

        :param chat_template: the model's; "" for none.
        """
        return self.raw or bool(self.suffix) or not chat_template

    def chat(self) -> ChatRequest:
        system = [ChatMessage(role="system", content=self.system)] if self.system else []
        content = with_images(self.prompt, self.images)
        return self._chat([*system, ChatMessage(role="user", content=content)])

    def completion(self) -> CompletionRequest:
        """Return the equivalent request to text completions.

        :raises ChangeSomething: if a field needs the chat template.
        """
        for name in ("system", "images", "think"):
            if getattr(self, name):
                problem, remedy = "needs the model's chat template", "set raw to false"
                if self.suffix:
                    problem, remedy = "cannot be combined with suffix", "leave out the suffix"
                raise ChangeSomething(name, "…", problem, f"leave it out, or {remedy}")
        fields = {**self._shared_fields(), "logprobs": self.likely_tokens()}
        fields |= {"prompt": self.prompt, "suffix": self.suffix}
        return CompletionRequest.model_validate(fields)

    @override
    def name_sent(self, field: str) -> str:
        if field.startswith("messages"):
            return "images" if self.images else "prompt"
        return super().name_sent(field)


def with_images(text: str, images: list[str] | None) -> str | list[Part]:
    """Return the content of a message: a text, or parts with images in base64."""
    if not images:
        return text
    parts: list[Part] = [TextPart(type="text", text=text)] if text else []
    for data in images:
        kind = _IMAGE_STARTS.get(data[:4], "png")
        url = ImageUrl(url=f"data:image/{kind};base64,{data}")
        parts.append(ImagePart(type="image_url", image_url=url))
    return parts


class OllamaEmbedRequest(OllamaModelBody):
    """Body of ``/api/embed``."""

    others = others_of("ollama_embeddings")

    input: str | Texts = ""
    """A text, or a list of at most 2048; if it is empty, the answer has no vectors."""
    truncate: bool = True
    """Cut a text at its end that is longer than the context; if false, it is refused."""
    dimensions: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    """Length to which vectors are cut, for models that were trained for it; 0 for all numbers."""
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    """Checked as in ``/api/generate``; no vector depends on them."""

    def openai_body(self) -> EmbeddingsRequest:
        return EmbeddingsRequest(
            model=self.model, input=self.input, dimensions=self.dimensions or None
        )


class OllamaEmbeddingsRequest(OllamaModelBody):
    """Body of ``/api/embeddings``."""

    others = others_of("ollama_embeddings")

    prompt: str = ""
    """The text; if it is empty, so is the vector."""
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    """Checked as in ``/api/generate``; the vector does not depend on them."""

    def openai_body(self) -> EmbeddingsRequest:
        return EmbeddingsRequest(model=self.model, input=self.prompt)

    @override
    def name_sent(self, field: str) -> str:
        return "prompt" if field == "input" else field
