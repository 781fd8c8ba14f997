"""Latency objectives (``--slo-ttft``, ``--slo-tpot``), and whether requests are late.

The deciding part knows no clock: after every step the loop looks at its own, and says through the
journal whether requests are late, so that a replay decides the same.
"""

from collections.abc import Sequence
from math import inf

from kvell.clock import Clock
from kvell.engine.core.lateness import Lateness, LatenessWatch
from kvell.engine.planning.admission import INITIAL_EXPECTED_OUTPUT
from kvell.engine.protocol.messages import Cancel, Event, Submit
from kvell.engine.setup.options import EngineOptions
from kvell.errors import ChangeSomething


def check_objectives(options: EngineOptions) -> None:
    """Refuse objectives that could have no effect.

    :raises ChangeSomething: for one that is not above 0, without a CPU buffer, or without chunked
        prefill.
    """
    asked = {"--slo-ttft": options.slo_ttft_seconds, "--slo-tpot": options.slo_tpot_seconds}
    for flag, seconds in asked.items():
        if seconds is None:
            continue
        if not seconds > 0:
            raise ChangeSomething(flag, seconds, "is not above 0", "give seconds, or leave it out")
        if options.cpu_buffer_bytes is None:
            problem = "decides how much of a CPU buffer prompts may use, and there is none"
            raise ChangeSomething(flag, seconds, problem, "add --cpu-buffer SIZE, or leave it out")
        if not options.enable_chunked_prefill:
            problem = "lets prompts go ahead of decodes, as they always do without chunked prefill"
            remedy = "leave it out, or --no-enable-chunked-prefill"
            raise ChangeSomething(flag, seconds, problem, remedy)


class ObjectiveWatch:
    """Reads the clock when requests arrive and steps end."""

    def __init__(self, watch: LatenessWatch, clock: Clock) -> None:
        self._watch, self._clock = watch, clock

    def heard(self, command: Submit | Cancel, events: Sequence[Event]) -> None:
        """Note a command; ``events`` are its immediate answers, if it needs no step.

        A refused request is never late; a cancelled one is late no more.
        """
        now_seconds = self._clock.now_seconds()
        if isinstance(command, Cancel):
            self._watch.step(events, now_seconds)
        elif not events:
            self._watch.submitted(command.request_id, now_seconds)

    def after_step(self, events: Sequence[Event]) -> Lateness:
        """Take in a step's events; return whether requests are late."""
        return self._watch.step(events, self._clock.now_seconds())


def watch_of(options: EngineOptions, clock: Clock) -> ObjectiveWatch | None:
    """The watch for an engine's objectives; None if it has none.

    An objective that is not given is never missed.  An answer is taken to have as many tokens as
    the scheduler expects of one.
    """
    ttft, tpot = options.slo_ttft_seconds, options.slo_tpot_seconds
    if ttft is None and tpot is None:
        return None
    first, further = (inf if asked is None else asked for asked in (ttft, tpot))
    watch = LatenessWatch.ahead_of(first, further, INITIAL_EXPECTED_OUTPUT)
    return ObjectiveWatch(watch, clock)
