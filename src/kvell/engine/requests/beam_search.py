"""Decisions of beam search: beams and the logprobs of their next tokens give the next beams.

The rules are those of transformers' ``generate(num_beams=…, do_sample=False)``::

    running beams ──one token each──► candidates, likeliest first
         ▲                              │ among the first ``beam_width``: ends ──► finished
         └── the first that go on ◄─────┘            (the best ``beam_width`` by score)

A score is the sum of the log probabilities of a beam's tokens, divided by
``length ** length_penalty``; the length counts the tokens of the answer, its end included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

import msgspec

from kvell.engine.protocol.given import number, whole
from kvell.engine.protocol.logprobs import MAX_LOGPROBS, KeptLogprobs, TokenLogprobs
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.equivalents.arguments import BEAM_OTHERS
from kvell.equivalents.other import refuses_unknown
from kvell.errors import ChangeSomething
from kvell.wire.decoding import decode

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0
EarlyStopping = bool | Literal["never"]
"""When a beam search ends: see :class:`BeamSearchParams`."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(TokenLogprobs)


@refuses_unknown(BEAM_OTHERS)
@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search, with vLLM's and transformers' names.

    :param beam_width: number of beams, and of answers; 1 to 10.
    :param max_tokens: most output tokens.
    :param ignore_eos: continue after the model's end-of-sequence token.
    :param temperature: checked, but without effect: beams are compared by the model's own
        probabilities.
    :param length_penalty: the exponent of the length in scores; above 0 longer answers gain.
    :param early_stopping: True ends as soon as there are ``beam_width`` answers; False when the
        best running beam, as long as it is now, is no better than the worst answer; ``never``
        when no longer beam could become better, if log probabilities stay below 0.
    :param min_tokens: no token ends an answer before this length.
    :param stop_token_ids: an answer also ends after any of these tokens.
    :param logprobs: report each token's logprob, and this many likeliest tokens, at most 20.
    :raises ChangeSomething: names the field that is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def refuse(field: str, problem: str, remedy: str) -> None:
            raise ChangeSomething(field, getattr(self, field), problem, remedy)

        checked = SamplingParams(
            temperature=self.temperature,
            max_tokens=whole("max_tokens", self.max_tokens),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
        )
        for name in ("ignore_eos", "min_tokens", "stop_token_ids", "logprobs"):
            object.__setattr__(self, name, getattr(checked, name))
        object.__setattr__(self, "beam_width", whole("beam_width", self.beam_width))
        object.__setattr__(self, "length_penalty", number("length_penalty", self.length_penalty))
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            problem = f"must be between 1 and {MAX_BEAM_WIDTH}"
            refuse("beam_width", problem, f"use at most {MAX_BEAM_WIDTH} beams")
        penalty = self.length_penalty
        if not isfinite(penalty) or abs(penalty) > MAX_LENGTH_PENALTY:
            problem = f"must be between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}"
            refuse("length_penalty", problem, "use 1 for the mean log probability")
        early: object = self.early_stopping
        if not isinstance(early, bool) and early != "never":
            refuse("early_stopping", "is unknown", 'use true, false or "never"')


@dataclass(frozen=True, eq=False, slots=True)
class Beam:
    """One answer so far: its last token, after the beam that it continues.

    Beams share their beginnings, so a step costs the same at any length.

    :param parent: the beam without the last token; None for the empty one.
    :param packed: logprob of the last token, with the likeliest tokens at its position, as
        MessagePack: it takes an eighth of the memory.
    :param score: key for the order of ended answers.
    :param finish_reason: ``stop`` at a stop token, ``length`` at the limit; None while it runs.
    """

    length: int = 0
    parent: "Beam | None" = None
    last_token: int = -1
    packed: bytes = b""
    cumulative_logprob: float = 0.0
    score: float = 0.0
    finish_reason: Literal["stop", "length"] | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple([beam.last_token for beam in self._ancestors()][::-1])

    @property
    def logprobs(self) -> KeptLogprobs:
        """The logprobs of the tokens, each with the likeliest tokens at its position."""
        packed = [beam.packed for beam in self._ancestors()]
        return KeptLogprobs(decode(_DECODER, each) for each in reversed(packed))

    def _ancestors(self) -> "Iterator[Beam]":
        beam: Beam | None = self
        while beam is not None and beam.parent is not None:
            yield beam
            beam = beam.parent


@dataclass(frozen=True)
class BeamSearch:
    """The state of one prompt's search.

    :param ends: tokens that end an answer.
    :param running: beams that continue, likeliest first; all are of one length.
    :param finished: the best answers so far, best first, at most ``beam_width``.
    """

    params: BeamSearchParams
    ends: frozenset[int]
    running: tuple[Beam, ...] = (Beam(),)
    finished: tuple[Beam, ...] = ()

    @classmethod
    def of(cls, params: BeamSearchParams, eos_token_ids: frozenset[int]) -> "BeamSearch":
        """Return a new search.

        :param eos_token_ids: end-of-sequence tokens of the model.
        :raises ChangeSomething: if more tokens may end an answer than logprobs can include.
        """
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= eos_token_ids
        max_ends = MAX_LOGPROBS - params.beam_width
        if len(ends) > max_ends:
            problem = f"makes {len(ends)} tokens that end an answer, and there may be {max_ends}"
            value = len(params.stop_token_ids)
            remedy = "use fewer of them, or a smaller beam_width"
            raise ChangeSomething("stop_token_ids", f"{value} tokens", problem, remedy)
        return cls(params, ends)

    @property
    def candidates(self) -> int:
        """Number of likeliest tokens needed of each beam, so that ``beam_width`` can continue."""
        return self.params.beam_width + len(self.ends)

    def sampling(self) -> SamplingParams:
        """Return the parameters of a request for the logprobs of a beam's next tokens."""
        count = max(self.candidates, self.params.logprobs or 0)
        return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=count)

    def after(self, logprobs: Sequence[TokenLogprobs]) -> "BeamSearch":
        """Return the search after one more token of every beam."""
        width = self.params.beam_width
        length = self.running[0].length + 1
        is_last = length >= self.params.max_tokens
        penalty = length**self.params.length_penalty
        finished = list(self.finished)
        running = list[Beam]()
        for place, beam in enumerate(self._longer(logprobs)):
            if is_last or beam.last_token in self.ends:
                if place < width:
                    finished.append(self._ended(beam, penalty))
            elif len(running) < width:
                running.append(beam)
        finished.sort(key=lambda beam: -beam.score)
        return replace(self, running=tuple(running), finished=tuple(finished[:width]))

    @property
    def is_over(self) -> bool:
        if not self.running:
            return True
        params = self.params
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        may_grow = params.early_stopping == "never" and params.length_penalty > 0
        length = params.max_tokens if may_grow else self.running[0].length
        best_score: float = self.running[0].cumulative_logprob / length**params.length_penalty
        return best_score <= self.finished[-1].score

    def _ended(self, beam: Beam, penalty: float) -> Beam:
        score = beam.cumulative_logprob / penalty
        is_stopped = beam.last_token in self.ends
        return replace(beam, score=score, finish_reason="stop" if is_stopped else "length")

    def _longer(self, logprobs: Sequence[TokenLogprobs]) -> list[Beam]:
        """Return running beams, each with one of its likeliest next tokens; likeliest first."""
        may_end = self.running[0].length >= self.params.min_tokens
        beams = [
            (beam.cumulative_logprob + logprob, beam, likely, rank)
            for beam, likely in zip(self.running, logprobs, strict=True)
            for rank, (token, logprob) in enumerate(likely.top[: self.candidates], start=1)
            if may_end or token not in self.ends
        ]
        beams.sort(key=lambda candidate: -candidate[0])  # of equal ones the better beam's first
        needed = self.params.beam_width * (1 + len(self.ends))
        return [_longer(*candidate, self.params.logprobs) for candidate in beams[:needed]]


def _longer(total: float, beam: Beam, likely: TokenLogprobs, rank: int, shown: int | None) -> Beam:
    """Return a beam with its next token, which has this rank among the likeliest."""
    token, logprob = likely.top[rank - 1]
    packed = _ENCODER.encode(TokenLogprobs(logprob, rank, likely.top[: shown or 0]))
    return Beam(beam.length + 1, beam, token, packed, total)
