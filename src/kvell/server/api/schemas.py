"""OpenAI's request bodies, with vLLM's extensions, as far as they are served.

A field that would change the answer and is not served is refused by name; fields
that only accompany a request (``user``, ``metadata`` …) are accepted and unused.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething

MAX_INT32 = 2**31 - 1
MAX_PROMPTS = 128

TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Count = Annotated[int, Field(ge=-1, le=MAX_INT32)]


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What chat and text completions share."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    max_tokens: Count | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    prompt_cache_key: str | None = Field(default=None, max_length=1024)
    will_return: StrictBool | None = None
    return_token_ids: bool | None = False

    n: int | None = 1
    frequency_penalty: float | None = 0
    presence_penalty: float | None = 0
    repetition_penalty: float | None = 1
    logit_bias: dict[str, float] | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None

    def neutral_fields(self) -> dict[str, tuple[Any, ...]]:
        """Fields not served yet, each with the values that mean "not used"."""
        return {
            "frequency_penalty": (None, 0),
            "presence_penalty": (None, 0),
            "repetition_penalty": (None, 1),
            "logit_bias": (None, {}),
        }

    def output_limit(self) -> int | None:
        """Output tokens asked for; None means as many as fit."""
        return self.max_tokens

    def sampling(self, room_tokens: int) -> SamplingParams:
        """Validated sampling parameters for a prompt that leaves so much room.

        :raises ChangeSomething: naming a field that is not served or out of range.
        """
        self._refuse_unserved()
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            max_tokens=self._max_tokens(room_tokens),
            stop=self._stop_strings(),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            n=self.choices(),
            will_return=self.will_return,
        )

    def choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def continuous_usage(self) -> bool:
        """Whether every piece of a stream says what was used so far."""
        options = self.stream_options
        return options is not None and bool(
            options.include_usage and options.continuous_usage_stats
        )

    def _stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _max_tokens(self, room_tokens: int) -> int:
        limit = self.output_limit()
        if limit is None:
            return room_tokens
        if limit > room_tokens:
            remedy = f"ask for at most {room_tokens} or shorten the prompt"
            raise ChangeSomething("max_tokens", limit, "exceeds the model's context", remedy)
        return limit

    def _refuse_unserved(self) -> None:
        for name, neutral in self.neutral_fields().items():
            if (value := getattr(self, name)) not in neutral:
                raise ChangeSomething(name, value, "is not supported", "leave it out")


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    prompt: str | list[TokenId] | list[list[TokenId]] | list[str]
    max_tokens: Count | None = 16
    best_of: int | None = 1
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None

    def neutral_fields(self) -> dict[str, tuple[Any, ...]]:
        """Fields not served yet, each with the values that mean "not used"."""
        return super().neutral_fields() | {
            "best_of": (None, 1),
            "echo": (None, False),
            "logprobs": (None,),
            "suffix": (None, ""),
        }

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids.

        :raises ChangeSomething: when there are none or too many.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        if not 1 <= len(prompt) <= MAX_PROMPTS:
            remedy = f"send 1 to {MAX_PROMPTS}"
            raise ChangeSomething("prompt", f"{len(prompt)} prompts", "is out of range", remedy)
        return [each for each in prompt if not isinstance(each, int)]


class TextPart(BaseModel):
    """A piece of a message; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Role and text, as chat templates know them."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ResponseFormat(BaseModel):
    """Only plain text is served."""

    type: str


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    def neutral_fields(self) -> dict[str, tuple[Any, ...]]:
        """Fields not served yet, each with the values that mean "not used"."""
        return super().neutral_fields() | {
            "logprobs": (None, False),
            "top_logprobs": (None, 0),
            "tools": (None, []),
            "tool_choice": (None, "none", "auto"),
            "response_format": (None, ResponseFormat(type="text")),
        }

    def output_limit(self) -> int | None:
        """``max_completion_tokens``, or its older name."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens
