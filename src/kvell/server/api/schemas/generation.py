"""OpenAI's request bodies, with vLLM's extensions."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool
from typing_extensions import override

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.schemas.references import Schema
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.requests.beam_search import MAX_BEAM_WIDTH, BeamSearch, BeamSearchParams
from kvell.engine.sampling.model_defaults import NEUTRAL
from kvell.errors import ChangeSomething
from kvell.server.api.schemas.formats import (
    ResponseFormat,
    choice_texts,
    json_constraint,
)
from kvell.server.api.schemas.other_fields import others_of
from kvell.server.api.schemas.sampling_fields import MAX_INT32, Count, SamplingFields, TokenIds
from kvell.server.text.text_bounds import AnswerRoom
from kvell.server.text.text_encoder import PromptForm

MAX_PROMPTS = 128

FAILS_FAST = Field(fail_fast=True)
"""Validation that ends at a list's first invalid element: a million errors would take a minute."""
Texts = Annotated[list[str], FAILS_FAST]
LastTokens = Annotated[int, Field(ge=-1, le=MAX_INT32)]


def texts_or_tokens(
    field: str, given: str | list[int] | list[list[int]] | list[str], most: int
) -> list[str | list[int]]:
    """Return one or several prompts, each as text or token ids.

    :raises ChangeSomething: if there are none, or more than ``most``.
    """
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [[token for token in given if isinstance(token, int)]]
    if not 1 <= len(given) <= most:
        value, remedy = f"{len(given)} {field}s", f"send 1 to {most}"
        raise ChangeSomething(field, value, "is out of range", remedy)
    return [each for each in given if not isinstance(each, int)]


class GenerationRequest(SamplingFields):
    """The fields that chat and text completions share."""

    max_tokens: Count | None = None
    """Maximum output tokens, at least 1; as many as fit if null."""
    truncate_prompt_tokens: LastTokens | None = None
    """Number of tokens to keep of a prompt, from its end; -1 keeps as many as leave room for
    ``max_tokens`` in the model's context."""
    n: int | None = 1
    prompt_logprobs: int | None = None
    repeat_last_n: LastTokens | None = None
    """Penalties look at this number of last tokens of prompt and output, as in llama.cpp; -1 or
    null for all, 0 for no penalties."""
    use_beam_search: bool | None = False
    """Find the ``n`` likeliest answers, with as many beams, at most 10, without sampling."""
    length_penalty: float | None = None
    """With ``use_beam_search``: scores are divided by the length to this power; 1 if null."""
    early_stopping: StrictBool | Literal["never"] | None = None
    """With ``use_beam_search``: end as soon as every beam has an answer, as in transformers."""
    return_token_ids: bool | None = False
    """Return the ids of the answer's tokens as well as its text."""

    response_format: ResponseFormat | None = None
    """Constraint of the answer's text, in OpenAI's format."""
    guided_json: Schema | str | None = None
    """JSON schema that the text follows; an older name of ``structured_outputs.json``."""
    guided_regex: str | None = None
    """Pattern that the text matches; an older name of ``structured_outputs.regex``."""
    guided_choice: Texts | None = None
    """The text is one of these; an older name of ``structured_outputs.choice``."""
    guided_grammar: str | None = None
    """Grammar that the text follows; an older name of ``structured_outputs.grammar``."""

    def output_limit(self) -> int | None:
        """Return the most output tokens; None, or more than fit, means as many as fit."""
        return self.max_tokens

    def limit_field(self) -> str:
        return "max_tokens"

    def name_sent(self, field: str) -> str:
        return self.limit_field() if field == "max_tokens" else field

    def session(self) -> str:
        return self.prompt_cache_key or self.session_id or ""

    def output_logprobs(self) -> int | None:
        """Return the number of likeliest tokens at each output token; None for no probabilities."""
        return None

    def scored_prompt(self) -> int | None:
        """Return the number of likeliest tokens at each prompt token; None for no probabilities."""
        return self.prompt_logprobs

    def form(self) -> PromptForm:
        """Return the form of the request's prompt.

        :raises ChangeSomething: if the form keeps no token.
        """
        if self.truncate_prompt_tokens == 0:
            remedy = "use -1 for as many as fit, or leave it out"
            raise ChangeSomething("truncate_prompt_tokens", 0, "leaves no prompt", remedy)
        answer_tokens = self.output_limit() or 1
        return PromptForm(self.adds_special_tokens(), self.truncate_prompt_tokens, answer_tokens)

    def adds_special_tokens(self) -> bool:
        return True

    def sampling(self, room: AnswerRoom, defaults: SamplingParams = NEUTRAL) -> SamplingParams:
        """Return validated sampling parameters for a prompt that leaves this room.

        :raises ChangeSomething: naming a field that is out of range.
        """
        given = {name: value for name in SAME_FIELDS if (value := getattr(self, name)) is not None}
        recommended = {name: getattr(defaults, name) for name in RECOMMENDED}
        limit = self.output_limit()
        if limit is None:
            limit = min(room.usual_tokens, defaults.max_tokens or room.usual_tokens)
        made: dict[str, Any] = {
            "max_tokens": min(limit, room.most_tokens),  # agents send a constant
            "will_return": self.will_return if self.kv_hints is None else self.returns(),
            "logprobs": self.output_logprobs(),
            "prompt_logprobs": self.scored_prompt(),
        }
        if self.stop:
            texts = [self.stop] if isinstance(self.stop, str) else self.stop
            made["stop"] = tuple(text for text in texts if text)
        if self.logit_bias:
            made["logit_bias"] = self._biases()
        if any(getattr(self, name) is not None for name in CONSTRAINTS):
            made["structured_outputs"] = self.constraint()
        return SamplingParams.of(recommended | given | made)

    def constraint(self) -> StructuredOutputs | None:
        """Return the constraint of the answer's text; None for any text.

        :raises ChangeSomething: if several fields have a constraint, or one is invalid.
        """
        forms = {
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
        }
        fields = {name: form.constraint() for name, form in forms.items() if form is not None}
        fields |= self._guided()
        given = {name: constraint for name, constraint in fields.items() if constraint is not None}
        if len(given) > 1:
            names = ", ".join(given)
            raise ChangeSomething(next(iter(given)), "…", f"is one of {names}", "give only one")
        return next(iter(given.values()), None)

    def choices(self) -> int:
        return 1 if self.n is None else self.n

    def returns(self) -> bool | None:
        """Return whether a later prompt will extend this one: ``will_return``, or else the hints.

        :raises ChangeSomething: naming an invalid field of the hints.
        """
        hinted = None if self.kv_hints is None else self.kv_hints.will_return()
        return hinted if self.will_return is None else self.will_return

    def sequences(self) -> int:
        return self.choices()

    def sequences_field(self) -> str:
        return "n"

    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(
            options.include_usage and options.continuous_usage_stats
        )

    def _guided(self) -> dict[str, StructuredOutputs]:
        constraints: dict[str, StructuredOutputs] = {}
        if self.guided_json is not None:
            constraints["guided_json"] = json_constraint(self.guided_json, "guided_json")
        if self.guided_regex is not None:
            made = StructuredOutputs(regex=self.guided_regex, named="guided_regex")
            constraints["guided_regex"] = made
        if self.guided_choice is not None:
            texts = choice_texts(self.guided_choice, "guided_choice")
            constraints["guided_choice"] = StructuredOutputs(choice=texts, named="guided_choice")
        if self.guided_grammar is not None:
            made = StructuredOutputs(grammar=self.guided_grammar, named="guided_grammar")
            constraints["guided_grammar"] = made
        return constraints

    def _biases(self) -> dict[int, float]:
        biases: dict[int, float] = {}
        for token, bias in (self.logit_bias or {}).items():
            if not token.isascii() or not token.isdigit() or len(token) > len(str(MAX_INT32)):
                problem = "is not a token id"
                raise ChangeSomething("logit_bias", repr(token[:40]), problem, "use token ids")
            biases[int(token)] = bias
        return biases


RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters that a model's files may recommend, besides ``max_tokens``."""
CONSTRAINTS = tuple(
    name
    for name in GenerationRequest.model_fields
    if name.startswith("guided_") or name in ("response_format", "structured_outputs")
)
"""Fields with a constraint of the answer's text."""
SAME_FIELDS = tuple(
    one.name
    for one in fields(SamplingParams)
    if one.name in GenerationRequest.model_fields
    and one.name not in ("max_tokens", "stop", "will_return", "logit_bias")
    and one.name not in ("logprobs", "prompt_logprobs", "structured_outputs")
)
"""Sampling parameters that are passed on as they were sent, if they were."""


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    others = others_of("everywhere", "generation", "completions")

    prompt: str | TokenIds | Annotated[list[TokenIds], FAILS_FAST] | Texts
    """A text, its token ids, or a list of either, at most 128."""
    max_tokens: Count | None = 16
    """Maximum output tokens; 0 only with ``echo``; as many as fit if null."""
    best_of: int | None = None
    """Must equal ``n``, or be 1 or null; with ``use_beam_search``: the number of beams."""
    echo: bool | None = False
    """Begin the text with the prompt."""
    logprobs: int | None = None
    """Return the log probability of each token, and this many likeliest tokens, at most 20."""
    suffix: str | None = None
    """The text after the answer, for models whose tokenizer has fill-in-the-middle tokens."""
    add_special_tokens: bool | None = True
    """Whether texts get the model's special tokens, such as one that begins a text."""

    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens is not False

    def output_logprobs(self) -> int | None:
        return self.logprobs

    def scored_prompt(self) -> int | None:
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    def output_limit(self) -> int | None:
        """Return ``max_tokens``, or 1 if the answer is the echoed prompt alone."""
        return 1 if self.is_prompt_alone else self.max_tokens

    @property
    def is_prompt_alone(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    @override
    def sampling(self, room: AnswerRoom, defaults: SamplingParams = NEUTRAL) -> SamplingParams:
        if not self.use_beam_search and self.best_of not in (None, 1, self.choices()):
            remedy = f"use {self.choices()}, or leave it out"
            raise ChangeSomething("best_of", self.best_of, "differs from n", remedy)
        return super().sampling(room, defaults)

    def sequences(self) -> int:
        beams = self.best_of if self.use_beam_search else None
        return self.choices() if beams is None else beams

    @override
    def sequences_field(self) -> str:
        return "best_of" if self.use_beam_search and self.best_of is not None else "n"

    def checked_suffix(self) -> str:
        """Return the text after the answer; "" for none.

        :raises ChangeSomething: if another field changes the prompt, too.
        """
        if self.suffix:
            for name in ("echo", "truncate_prompt_tokens", "prompt_logprobs"):
                if (value := getattr(self, name)) not in (None, False):
                    problem = "cannot be combined with suffix"
                    raise ChangeSomething(name, value, problem, "leave it out")
        return self.suffix or ""

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or token ids.

        :raises ChangeSomething: if there are none or too many.
        """
        return texts_or_tokens("prompt", self.prompt, MAX_PROMPTS)


FIELD = "use_beam_search"
TAKEN = frozenset(
    {"temperature", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "n", "will_return"}
    | {"min_tokens", "logprobs", "prompt_logprobs"}
)
"""Sampling parameters that a beam search obeys, or that have no effect in it."""

SAME: Mapping[str, Sequence[object]] = {"top_k": (-1,)}
"""Values with the meaning of the default, by parameter."""


def beam_searches(
    body: "GenerationRequest",
    samplings: Sequence[SamplingParams],
    eos_token_ids: frozenset[int],
    *,
    has_images: bool = False,
) -> list[BeamSearch]:
    """Return the search of each prompt; none if the body asks for no beam search.

    :raises ChangeSomething: naming a field that excludes a beam search, or needs one.
    """
    if not body.use_beam_search:
        _refuse_without(body)
        return []
    for sampling in samplings:
        _refuse_beside(body, sampling, has_images=has_images)
    return [BeamSearch.of(_params(body, sampling), eos_token_ids) for sampling in samplings]


def _params(body: "GenerationRequest", sampling: SamplingParams) -> BeamSearchParams:
    width = body.sequences()
    field = body.sequences_field()
    if width > MAX_BEAM_WIDTH:
        problem = "is too large"
        remedy = f"use at most {MAX_BEAM_WIDTH}"
        raise ChangeSomething(field, width, problem, remedy)
    if width < sampling.n:
        remedy = f"use {sampling.n} or more, or a smaller n"
        raise ChangeSomething(field, width, f"is fewer beams than {sampling.n} answers", remedy)
    return BeamSearchParams(
        width,
        sampling.max_tokens or 1,
        ignore_eos=sampling.ignore_eos,
        temperature=sampling.temperature,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
    )


def _refuse_without(body: "GenerationRequest") -> None:
    for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
        value = getattr(body, name)
        if value is not None and value != default:
            raise ChangeSomething(name, value, f"needs {FIELD}", f"set {FIELD} to true")


def _refuse_beside(
    body: "GenerationRequest", sampling: SamplingParams, *, has_images: bool
) -> None:
    """Refuse fields that a beam search ignores: it ranks beams by the model's probabilities.

    Parameters of the model's files that the client did not send are ignored.
    """

    def refuse(name: str, value: object, remedy: str) -> None:
        raise ChangeSomething(name, value, f"cannot be combined with {FIELD}", remedy)

    if body.stream:
        refuse("stream", True, "leave it out: the answers are known when all beams have ended")
    if has_images:
        refuse(FIELD, True, "leave out the images, or use n and temperature")
    if sampling.reasoning_budget is not None:
        refuse("thinking_token_budget", sampling.reasoning_budget.tokens, "leave it out")
    if sampling.structured_outputs is not None:
        refuse(FIELD, True, "leave out the form of the answer and forced calls, or use n")
    for field in fields(SamplingParams):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        is_sent = field.name in body.model_fields_set and field.name not in TAKEN
        if is_sent and getattr(sampling, field.name) not in (default, *SAME.get(field.name, ())):
            refuse(field.name, getattr(body, field.name), "leave it out")
