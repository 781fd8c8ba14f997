from collections.abc import Sequence
from typing import Any

import numpy as np

from kvell.load.driver import Driver, Load
from kvell.load.http.wire import Wire
from kvell.load.outcome import Outcome
from kvell.load.prompts import Prompts, id_prompts
from kvell.simulator.traces.rows import TraceRow
from tests.load.virtual_time import FakeServer, run_virtually

WIRE = Wire("fake")
VOCAB_SIZE = 1_000


def row(
    at: float = 0.0,
    prompt: int = 6,
    output: int = 4,
    *,
    session: str | None = None,
    goes_on: bool = False,
    blocks: Sequence[int] = (),
) -> TraceRow:
    ids = np.asarray(blocks, np.int64)
    return TraceRow(
        at, prompt, output, ids, 2 if len(ids) else 0, session=session, continues=goes_on
    )


def conversation() -> list[TraceRow]:
    """Three turns of 6, 3 and 2 tokens of their own; answers of 4."""
    return [
        row(0.0, 6, session="s"),
        row(0.2, 13, session="s", goes_on=True),
        row(9.0, 19, session="s", goes_on=True),
    ]


def drive(
    server: FakeServer,
    rows: Sequence[TraceRow],
    prompts: Prompts[Any] | None = None,
    *,
    seed: int = 0,
    wire: Wire = WIRE,
    hang_ups: Sequence[int | None] = (),
    thinks: Sequence[float] | None = None,
    timeout: float = 60.0,
) -> list[Outcome]:
    """Outcomes of a load on the fake server, in virtual time; an answer's id is its length."""
    made = prompts or id_prompts(rows, seed, VOCAB_SIZE, lambda text: [len(text)])
    load = Load(rows, hang_ups or [None] * len(rows), thinks, timeout)
    return run_virtually(Driver(server, wire, made, load).run())
