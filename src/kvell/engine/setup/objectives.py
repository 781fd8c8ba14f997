"""Latency objectives (``--slo-ttft``, ``--slo-tpot``), and whether requests are late.

The engine core reads no clock: after every step the loop reads it and records in the journal
whether requests are late, so that a replay decides the same.
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
    """Refuse objectives that can have no effect.

    :raises ChangeSomething: for an objective that is not above 0, without a CPU buffer, or without
        chunked prefill.
    """
    objectives = {"--slo-ttft": options.slo_ttft_seconds, "--slo-tpot": options.slo_tpot_seconds}
    for flag, seconds in objectives.items():
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
    """A watch of objectives that reads the clock when requests arrive and steps end."""

    def __init__(self, watch: LatenessWatch, clock: Clock) -> None:
        self._watch, self._clock = watch, clock

    def on_command(self, command: Submit | Cancel, events: Sequence[Event]) -> None:
        """Note a command; ``events`` are its immediate answers, if it needs no step.

        Refused and cancelled requests are not late.
        """
        now_seconds = self._clock.now_seconds()
        if isinstance(command, Cancel):
            self._watch.step(events, now_seconds)
        elif not events:
            self._watch.on_submitted(command.request_id, now_seconds)

    def after_step(self, events: Sequence[Event]) -> Lateness:
        return self._watch.step(events, self._clock.now_seconds())


def watch_of(options: EngineOptions, clock: Clock) -> ObjectiveWatch | None:
    """Return the watch for an engine's objectives; None without objectives.

    An objective that is not set is never missed.  An answer is assumed to have the number of tokens
    that the scheduler expects.
    """
    ttft, tpot = options.slo_ttft_seconds, options.slo_tpot_seconds
    if ttft is None and tpot is None:
        return None
    first, further = (inf if objective is None else objective for objective in (ttft, tpot))
    watch = LatenessWatch.ahead_of(first, further, INITIAL_EXPECTED_OUTPUT)
    return ObjectiveWatch(watch, clock)
