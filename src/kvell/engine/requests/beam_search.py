"""Beam search, decided: beams and how likely their next tokens are go in, the next beams come out.

The rules are those of transformers' ``generate(num_beams=…, do_sample=False)``::

    running beams ──one token each──► candidates, likeliest first
         ▲                              │ among the first ``beam_width``: ends ──► finished
         └── the first that go on ◄─────┘            (the best ``beam_width`` by score)

A score is the sum of the log probabilities of a beam's tokens, divided by
``length ** length_penalty``; the length counts the tokens of the answer, its end included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

from kvell.engine.protocol.given import number, whole
from kvell.engine.protocol.logprobs import MAX_LOGPROBS, TokenLogprobs
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0
EarlyStopping = bool | Literal["never"]
"""When a beam search ends: see :class:`BeamSearchParams`."""


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search, with vLLM's and transformers' names.

    :param beam_width: beams that are followed, and answers that are found; 1 to 10.
    :param max_tokens: most output tokens.
    :param ignore_eos: go on past the model's end-of-sequence token.
    :param temperature: is checked and changes nothing: beams are compared by the model's own
        probabilities.
    :param length_penalty: the exponent of the length in scores; above 0 longer answers gain.
    :param early_stopping: True ends as soon as there are ``beam_width`` answers; False when the
        best running beam, as long as it is now, is no better than the worst answer; ``never``
        when no longer beam could become better, if log probabilities stay below 0.
    :param min_tokens: no token ends an answer before it has so many.
    :param stop_token_ids: an answer ends after any of these tokens, too.
    :param logprobs: tell how likely each token was, and this many likeliest tokens, at most 20.
    :raises ChangeSomething: naming the field that is out of range.
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


@dataclass(frozen=True)
class Beam:
    """One answer as far as it goes.

    :param token_ids: of the answer, a stop token included.
    :param logprobs: of its tokens, each with the candidates beside it.
    :param score: by which answers are ordered, once it has ended.
    :param finish_reason: ``stop`` at a stop token, ``length`` at the limit; None while it runs.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float = 0.0
    score: float = 0.0
    finish_reason: Literal["stop", "length"] | None = None


@dataclass(frozen=True)
class BeamSearch:
    """The state of one prompt's search.

    :param ends: tokens that end an answer.
    :param running: beams that go on, likeliest first; all are of one length.
    :param finished: the best answers so far, best first, at most ``beam_width``.
    """

    params: BeamSearchParams
    ends: frozenset[int]
    running: tuple[Beam, ...] = (Beam(),)
    finished: tuple[Beam, ...] = ()

    @classmethod
    def of(cls, params: BeamSearchParams, eos_token_ids: frozenset[int]) -> "BeamSearch":
        """A search that begins.

        :param eos_token_ids: of the model.
        :raises ChangeSomething: if more tokens may end an answer than can be told apart.
        """
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= eos_token_ids
        most = MAX_LOGPROBS - params.beam_width
        if len(ends) > most:
            problem = f"makes {len(ends)} tokens that end an answer, and there may be {most}"
            value, remedy = len(params.stop_token_ids), "use fewer of them, or a smaller beam_width"
            raise ChangeSomething("stop_token_ids", f"{value} tokens", problem, remedy)
        return cls(params, ends)

    @property
    def candidates(self) -> int:
        """Likeliest tokens that must be known of each beam: enough that so many can go on."""
        return self.params.beam_width + len(self.ends)

    def sampling(self) -> SamplingParams:
        """Parameters of the request that tells how likely a beam's next tokens are."""
        told = max(self.candidates, self.params.logprobs or 0)
        return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=told)

    def after(self, told: Sequence[TokenLogprobs]) -> "BeamSearch":
        """The search after one more token of every beam.

        :param told: of each running beam, with at least :attr:`candidates` likeliest tokens.
        """
        width, length = self.params.beam_width, len(self.running[0].token_ids) + 1
        is_last = length >= self.params.max_tokens
        penalty = length**self.params.length_penalty
        finished, running = list(self.finished), list[Beam]()
        for place, beam in enumerate(self._longer(told)):
            if is_last or beam.token_ids[-1] in self.ends:
                if place < width:
                    finished.append(self._ended(beam, penalty))
            elif len(running) < width:
                running.append(beam)
        finished.sort(key=lambda beam: -beam.score)
        return replace(self, running=tuple(running), finished=tuple(finished[:width]))

    @property
    def is_over(self) -> bool:
        """Whether the answers that are found are those of the search."""
        if not self.running:
            return True
        asked = self.params
        if len(self.finished) < asked.beam_width:
            return False
        if asked.early_stopping is True:
            return True
        may_grow = asked.early_stopping == "never" and asked.length_penalty > 0
        length = asked.max_tokens if may_grow else len(self.running[0].token_ids)
        best_score: float = self.running[0].cumulative_logprob / length**asked.length_penalty
        return best_score <= self.finished[-1].score

    def _ended(self, beam: Beam, penalty: float) -> Beam:
        score = beam.cumulative_logprob / penalty
        is_stopped = beam.token_ids[-1] in self.ends
        return replace(beam, score=score, finish_reason="stop" if is_stopped else "length")

    def _longer(self, told: Sequence[TokenLogprobs]) -> list[Beam]:
        """Every running beam with each of its likeliest next tokens; the likeliest beams first."""
        may_end = len(self.running[0].token_ids) >= self.params.min_tokens
        found = [
            (beam.cumulative_logprob + logprob, beam, one, rank)
            for beam, one in zip(self.running, told, strict=True)
            for rank, (token, logprob) in enumerate(one.top[: self.candidates], start=1)
            if may_end or token not in self.ends
        ]
        found.sort(key=lambda candidate: -candidate[0])  # of equal ones the better beam's first
        return [_longer(*candidate, self.params.logprobs) for candidate in found[: self._needed]]

    @property
    def _needed(self) -> int:
        """Candidates of all beams that matter: as many as the beams may go on behind their ends."""
        return self.params.beam_width * (1 + len(self.ends))


def _longer(total: float, beam: Beam, told: TokenLogprobs, rank: int, logprobs: int | None) -> Beam:
    """A beam with its next token, of this rank among the likeliest."""
    token, logprob = told.top[rank - 1]
    one = TokenLogprobs(logprob, rank, told.top[: logprobs or 0])
    return Beam((*beam.token_ids, token), (*beam.logprobs, one), total)
