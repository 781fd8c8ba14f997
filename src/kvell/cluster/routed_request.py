"""A request as its front counts it at instances, and whether it is retried: pure decisions.

::

    first death ──killed, cut──► again
        └───────crash, step────► again, on probation
    on probation: the only suspect until its next token; if the instance crashes or the step fails,
    it is refused, and others of that step are not blamed
"""

from array import array
from dataclasses import dataclass, field
from typing import Literal

from kvell.cluster.routing.instance_pace import FirstToken
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.vocabulary import RequestId

Cause = Literal["crash", "step", "killed", "cut", "hung", "protocol", "drained", "closing"]
"""The cause of an instance's end.  ``crash``: the process ended by itself; ``step``: a step failed
while the process lives; ``killed``: another process ended it; ``cut``: its connection ended for an
unknown reason; ``hung``: it sent nothing and was killed; ``protocol``: its message could
not be decoded; ``drained``: it was taken out of service; ``closing``: the front is shutting down.
"""
BLAMELESS: frozenset[Cause] = frozenset({"killed", "cut"})
"""Causes that no request of the instance is blamed for."""
MOST_RETRIES = 2
MOST_FAILED_STEPS = 16
"""Most failed steps in the life of a request, each of which its next token cleared it of."""
MOST_OUTPUT_TOKENS = 512
"""Most expected output tokens: many clients allow all that there is room for, and few answers are
that long."""


@dataclass(frozen=True)
class InstanceDeath:
    """The end of one incarnation.

    :param problem: a sentence for logs and answers.
    """

    problem: str
    cause: Cause


@dataclass
class Attempts:
    """The failures that a request went through.

    :ivar deaths: number of instances that ended while they had it.
    :ivar alone: of these, those that ended by their own fault while they had no other request.
    :ivar failed_steps: steps that were to compute it, while no other request was under suspicion.
    :ivar on_probation: whether it is under suspicion, so that it runs with no other suspect.
    """

    deaths: int = 0
    alone: int = 0
    failed_steps: int = 0
    on_probation: bool = False

    def after(self, cause: Cause, *, sole: bool) -> str | None:
        """Count a death; return why there is no further attempt, or None if there is one.

        An instance that was taken out of service is not counted.  A token since the last failed
        step clears a request of that step, so few share the blame.

        :param sole: whether the instance had no other request.
        """
        if cause == "drained":
            return None
        if cause == "step":
            self.failed_steps += 1
            if self.on_probation:
                return "it was the only suspect, so it is not retried"
            if self.failed_steps > MOST_FAILED_STEPS:
                return f"{MOST_FAILED_STEPS} such steps failed before, so it is not retried"
            self.on_probation = True
            return None
        self.deaths += 1
        self.alone += sole and cause not in BLAMELESS
        if self.deaths > MOST_RETRIES:
            return f"its instance ended {self.deaths} times, and a request is retried twice"
        if self.alone > 1 or (self.on_probation and cause == "crash"):
            return "two instances ended while they computed it, so it is not retried"
        self.on_probation = cause == "crash" or self.deaths == MOST_RETRIES
        return None


@dataclass
class RoutedRequest:
    """One request: what its caller asked for, and what instances still have to do for it.

    :param spec: what its caller asked for; its id is the one that instances see.
    :param line: the instance that has it, or had it last; "" before the first.
    :param goes_to: the instance that continues it once its prompt is computed; "" if it stays.
        ``goes_to_incarnation`` is the incarnation of that instance.
    :param is_migrating: whether it goes there in the middle of its answer.
    :param pulls_from: the instance to fetch its history from; "" for none.
    :param placement: of its KV cache, if it is longer than its instance's memory.
    :param predicted: when its first token comes, as seen at the choice of its instance; None if
        there was no choice.
    :param hit_tokens: tokens that the instance had cached when it was chosen, as far as is known.
    :param pending_prompt_tokens: prompt tokens that the instance still has to compute, as far as is
        known, those of the hit included.
    :param pending_output_tokens: tokens that the instance is still expected to make.
    :param held_tokens: tokens that its instance counts for it: its prompt and emitted tokens.
    :param output: tokens that were sent to the reader; the next attempt continues after them.
    :param is_dropped: whether the instance was sent a ``Cancel``.
    """

    spec: RequestSpec
    arrived_seconds: float
    attempt: int = 0
    line: str = ""
    goes_to: str = ""
    goes_to_incarnation: int = 0
    is_migrating: bool = False
    pulls_from: str = ""
    placement: tuple[RequestPlacementEntry, ...] = ()
    predicted: FirstToken | None = None
    hit_tokens: int = 0
    pending_prompt_tokens: int = 0
    pending_output_tokens: int = 0
    held_tokens: int = 0
    output: "array[int]" = field(default_factory=lambda: array("i"))
    is_dropped: bool = False
    attempts: Attempts = field(default_factory=Attempts)

    def __post_init__(self) -> None:
        self.request_id: RequestId = self.spec.request_id
        self.prompt_tokens = self.spec.prompt_tokens

    @property
    def emitted_tokens(self) -> int:
        return len(self.output)

    @property
    def expected_output_tokens(self) -> int:
        """Number of tokens that it may still make; a large limit is not taken as an estimate."""
        most = self.spec.sampling.max_tokens
        expected = MOST_OUTPUT_TOKENS if most is None else min(most, MOST_OUTPUT_TOKENS)
        return max(1, expected - len(self.output))
