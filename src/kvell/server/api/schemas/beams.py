"""Requests for beam search: their parameters, and fields that they exclude."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.beam_search import MAX_BEAM_WIDTH, BeamSearch, BeamSearchParams
from kvell.errors import ChangeSomething

if TYPE_CHECKING:
    from kvell.server.api.schemas.generation import GenerationRequest

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

    :param samplings: checked parameters of the prompts.
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
