"""OpenAI's request bodies, with vLLM's extensions.

Fields that only accompany a request (``user``, ``metadata`` …) are accepted and unused.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from kvell.engine.protocol.sampling_params import MAX_BIASES, SamplingParams
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.errors import ChangeSomething
from kvell.server.api.schemas.formats import (
    ResponseFormat,
    Schema,
    StructuredField,
    json_text,
)
from kvell.server.api.schemas.kv_hints import KvHints
from kvell.server.text.context_length import AnswerRoom

MAX_INT32 = 2**31 - 1
MAX_PROMPTS = 128
MAX_STOP_CHARS = 1024
MAX_DEADLINE_SECONDS = 86_400.0

TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
FAILS_FAST = Field(fail_fast=True)
"""A list is read up to the first that is wrong: a million complaints would take a minute."""
TokenIds = Annotated[list[TokenId], FAILS_FAST]
Texts = Annotated[list[str], FAILS_FAST]
Count = Annotated[int, Field(ge=-1, le=MAX_INT32)]
RepetitionPenalty = Annotated[float, Field(ge=1e-6)]
"""Logits are divided by it: a smaller one would make infinities of them."""
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Field(max_length=128)]
Biases = Annotated[dict[str, float], Field(max_length=MAX_BIASES)]


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    """Send a last piece with the tokens used and no choices."""
    include_obfuscation: bool | None = None
    """Accepted and not used."""
    continuous_usage_stats: bool | None = None
    """With ``include_usage``: every piece tells the tokens used so far."""


class GenerationRequest(BaseModel):
    """What chat and text completions share."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    """Name of a served model; the first one if null."""
    stream: bool | None = False
    """Send the answer piece by piece, as server-sent events."""
    stream_options: StreamOptions | None = None
    """What a stream carries besides text."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool = False
    max_tokens: Count | None = None
    """Most output tokens, at least 1; as many as fit if null."""
    min_tokens: int | None = None
    n: int | None = 1
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Biases | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = False
    """Find the ``n`` likeliest answers, with as many beams, at most 10; nothing is drawn."""
    length_penalty: float | None = None
    """With ``use_beam_search``: scores are divided by the length to this power; 1 if null."""
    early_stopping: StrictBool | Literal["never"] | None = None
    """With ``use_beam_search``: end as soon as every beam has an answer, as in transformers."""
    return_token_ids: bool | None = False
    """Tell the ids of the answer's tokens beside its text."""

    response_format: ResponseFormat | None = None
    """Form of the answer's text, in OpenAI's words."""
    structured_outputs: StructuredField | None = None
    guided_json: Schema | str | None = None
    """JSON schema that the text follows; an older name of ``structured_outputs.json``."""
    guided_regex: str | None = None
    """Pattern that the text matches; an older name of ``structured_outputs.regex``."""
    guided_choice: list[str] | None = None
    """The text is one of these; an older name of ``structured_outputs.choice``."""
    guided_grammar: str | None = None
    """Grammar that the text follows; an older name of ``structured_outputs.grammar``."""

    cache_salt: str | None = Field(default=None, max_length=1024)
    """Only requests with the same salt share cached prefixes."""
    prompt_cache_key: str | None = Field(default=None, max_length=1024)
    """Name of the conversation, for ``--routing session``."""
    prompt_cache_retention: str | None = Field(default=None, max_length=64)
    """Accepted and not used."""
    will_return: StrictBool | None = None
    kv_hints: KvHints | None = None
    """An orchestrator's advice on the KV cache, in the envelope that vLLM, SGLang and TensorRT-LLM
    take: ``kv.retain`` says what ``will_return`` does; other actions are named in the log."""
    deadline_seconds: Annotated[float, Field(gt=0, le=MAX_DEADLINE_SECONDS)] | None = None
    """A request that has not ended by then ends with 408."""
    priority: Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)] | None = None
    """Requests with a lower number go first; 0 if null."""

    user: str | None = None
    """Accepted and not used."""
    metadata: dict[str, Any] | None = None
    """Accepted and not used."""
    store: bool | None = None
    """Accepted and not used.  Nothing is stored."""
    service_tier: str | None = None
    """Accepted and not used."""
    safety_identifier: str | None = None
    """Accepted and not used."""

    def output_limit(self) -> int | None:
        """Output tokens asked for; None means as many as fit."""
        return self.max_tokens

    def output_logprobs(self) -> int | None:
        """Likeliest tokens to tell of at each position of the answer; None to tell nothing."""
        return None

    def scored_prompt(self) -> int | None:
        """Likeliest tokens to tell of at each position of the prompt; None to tell nothing."""
        return self.prompt_logprobs

    def sampling(self, room: AnswerRoom) -> SamplingParams:
        """Validated sampling parameters for a prompt that leaves so much room.

        :raises ChangeSomething: naming a field that is out of range.
        """
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            max_tokens=self._max_tokens(room),
            stop=self._stop_strings(),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            n=self.choices(),
            will_return=self.returns(),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self._biases(),
            min_tokens=self.min_tokens or 0,
            logprobs=self.output_logprobs(),
            prompt_logprobs=self.scored_prompt(),
            structured_outputs=self.constraint(),
        )

    def constraint(self) -> StructuredOutputs | None:
        """What the answer must look like; None for any text.

        :raises ChangeSomething: if several fields say so, or one says it wrongly.
        """
        asked = {
            "response_format": self.response_format and self.response_format.constraint(),
            "structured_outputs": self.structured_outputs and self.structured_outputs.constraint(),
            "guided_json": self._guided_json(),
            "guided_regex": self.guided_regex and StructuredOutputs(regex=self.guided_regex),
            "guided_choice": self.guided_choice
            and StructuredOutputs(choice=tuple(self.guided_choice)),
            "guided_grammar": self.guided_grammar
            and StructuredOutputs(grammar=self.guided_grammar),
        }
        given = {name: one for name, one in asked.items() if isinstance(one, StructuredOutputs)}
        if len(given) > 1:
            names = ", ".join(given)
            raise ChangeSomething(next(iter(given)), "…", f"is one of {names}", "give only one")
        return next(iter(given.values()), None)

    def choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    def returns(self) -> bool | None:
        """Whether a later prompt will begin with this one: ``will_return``, or what hints say.

        :raises ChangeSomething: naming what is wrong in the hints.
        """
        hinted = None if self.kv_hints is None else self.kv_hints.will_return()
        return hinted if self.will_return is None else self.will_return

    def sequences(self) -> int:
        """Requests to the instance that each prompt needs at once: answers, or beams."""
        return self.choices()

    def sequences_field(self) -> str:
        """The field that says how many they are, for errors."""
        return "n"

    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def continuous_usage(self) -> bool:
        """Whether every piece of a stream says what was used so far."""
        options = self.stream_options
        return options is not None and bool(
            options.include_usage and options.continuous_usage_stats
        )

    def _guided_json(self) -> StructuredOutputs | None:
        if self.guided_json is None:
            return None
        return StructuredOutputs(json=json_text(self.guided_json, "guided_json"))

    def _stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _biases(self) -> dict[int, float]:
        """Biases by token id, which JSON can only have as text."""
        found: dict[int, float] = {}
        for token, bias in (self.logit_bias or {}).items():
            if not token.isascii() or not token.isdigit() or len(token) > len(str(MAX_INT32)):
                problem = "is no token id"
                raise ChangeSomething("logit_bias", repr(token[:40]), problem, "use token ids")
            found[int(token)] = bias
        return found

    def _max_tokens(self, room: AnswerRoom) -> int:
        limit = self.output_limit()
        if limit is None:
            return room.usual_tokens
        if limit > room.most_tokens:
            remedy = f"ask for at most {room.most_tokens} or shorten the prompt"
            raise ChangeSomething("max_tokens", limit, "exceeds the model's context", remedy)
        return limit


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    prompt: str | TokenIds | Annotated[list[TokenIds], FAILS_FAST] | Texts
    """A text, its token ids, or a list of either, at most 128."""
    max_tokens: Count | None = 16
    """Most output tokens; 0 only with ``echo``; as many as fit if null."""
    best_of: int | None = None
    """Must equal ``n``, or be 1 or null; with ``use_beam_search``: how many beams."""
    echo: bool | None = False
    """Begin the text with the prompt."""
    logprobs: int | None = None
    """Tell how likely each token was, and this many likeliest tokens, at most 20."""
    suffix: str | None = None
    """Not supported: only null and an empty text are taken."""

    def output_logprobs(self) -> int | None:
        """``logprobs``."""
        return self.logprobs

    def scored_prompt(self) -> int | None:
        """``logprobs`` too, where the prompt is a part of the answer."""
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    def output_limit(self) -> int | None:
        """``max_tokens``; only a prompt that is told again can be asked for alone."""
        return 1 if self.is_prompt_alone else self.max_tokens

    @property
    def is_prompt_alone(self) -> bool:
        """Whether the answer is the prompt and nothing else, to see how likely it is."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self, room: AnswerRoom) -> SamplingParams:
        """Validated sampling parameters for a prompt that leaves so much room.

        :raises ChangeSomething: naming a field that is not served or out of range.
        """
        if self.suffix:
            raise ChangeSomething("suffix", "…", "is not supported", "leave it out")
        if not self.use_beam_search and self.best_of not in (None, 1, self.choices()):
            remedy = f"use {self.choices()}, or leave it out"
            raise ChangeSomething("best_of", self.best_of, "differs from n", remedy)
        return super().sampling(room)

    def sequences(self) -> int:
        """``best_of`` beams, or ``n`` answers."""
        beams = self.best_of if self.use_beam_search else None
        return self.choices() if beams is None else beams

    def sequences_field(self) -> str:
        """``best_of`` if that says how many beams there are."""
        return "best_of" if self.use_beam_search and self.best_of is not None else "n"

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
