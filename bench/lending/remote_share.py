"""Milliseconds of a decode step, by the share of a request's sections at another instance.

Run from the repository's root: ``python -m bench.lending.remote_share``.  See README.md beside
this file.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from kvell.cli.terminal.environment import process_cache_dir
from kvell.engine.assembly import EngineOptions, build_engine, load_model
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import MoveKvCache, Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.mempool.rendezvous import FolderRendezvous, make_folder
from kvell.models.sources.packaged import packaged_model
from kvell.models.sources.progress import quiet
from kvell.vocabulary import MIB, SECTION_TOKENS, RequestId

NAME = RequestId("long")
EIGHTHS = (0, 1, 2, 4, 6, 7)
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Share:
    """Decode steps with some sections away, and of a request beside it that has all of them.

    :param away: sections that lie at the other instance, of ``sections``.
    :param local_seconds: of each round, the median of its steps; ``step_seconds`` likewise.
    """

    away: int
    sections: int
    local_seconds: list[float]
    step_seconds: list[float]

    @property
    def speeds(self) -> list[float]:
        """Speed as a share of the local one, of each round."""
        return [a / b for a, b in zip(self.local_seconds, self.step_seconds, strict=True)]


class Pair:
    """A debtor with one long request, and a creditor.

    :param context: tokens of its prompt.
    :param answer: tokens that it makes at most.
    """

    def __init__(self, folder: Path, dtype: str, context: int, answer: int) -> None:
        folder.mkdir()
        make_folder(folder)
        path = packaged_model(process_cache_dir())
        self.engines = [self._engine(path, dtype, name, folder) for name in ("debtor", "creditor")]
        self.sections = (context - 1) // SECTION_TOKENS
        prompt = np.random.default_rng(0).integers(100, 40000, context).astype("<i4")
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        self.engines[0].handle(Submit(RequestSpec(NAME, prompt.tobytes(), sampling)))
        core = self.engines[0].core
        self._go_on(lambda: sum(one.is_decoding for one in core.running) == 1)

    def _engine(self, path: Path, dtype: str, name: str, folder: Path) -> Engine:
        model = load_model(path, dtype, "cpu", quiet)
        place = FolderRendezvous(name, folder)
        options = EngineOptions(kv_memory_bytes=512 * MIB, pool_place=place)
        return build_engine(model, "smollm2", options)

    @property
    def away(self) -> int:
        """Sections that the debtor reads at the creditor."""
        return self.engines[0].core.stats().sections["borrowed"]

    def lend(self, sections: int) -> None:
        """Let so many sections more lie at the creditor."""
        until = self.away + sections
        self.engines[0].handle(MoveKvCache(NAME, 0, sections, "creditor"))
        self._go_on(lambda: self.away == until)

    def steps_seconds(self, count: int) -> list[float]:
        """Seconds of the debtor's next decode steps."""
        found = []
        for _ in range(count):
            started = time.perf_counter()
            self.engines[0].step()
            found.append(time.perf_counter() - started)
        return found

    def close(self) -> None:
        """End both."""
        for engine in self.engines:
            engine.close()

    def _go_on(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError("the section did not arrive")
            for engine in self.engines:
                engine.woken()
                if engine.has_work():
                    engine.step()


def measured(dtype: str, context: int, rounds: int, steps: int) -> list[Share]:
    """Let more and more of one request lie elsewhere; measure it in turn with one that is local."""
    found = []
    answer = len(EIGHTHS) * rounds * (steps + 2) + 2000
    with tempfile.TemporaryDirectory() as directory:
        local, lent = (Pair(Path(directory, n), dtype, context, answer) for n in ("a", "b"))
        try:
            for eighths in EIGHTHS:
                more = round(lent.sections * eighths / 8) - lent.away
                if more:
                    lent.lend(more)
                share = Share(lent.away, lent.sections, [], [])
                for turn in range(rounds):
                    both = [(local, share.local_seconds), (lent, share.step_seconds)]
                    for pair, seconds in both if turn % 2 == 0 else both[::-1]:
                        pair.steps_seconds(2)  # caches hold the other one's weights
                        seconds.append(statistics.median(pair.steps_seconds(steps)))
                found.append(share)
        finally:
            local.close()
            lent.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = measured(options.dtype, options.context, options.rounds, options.steps)
    table = Table("sections away", "ms a step, local", "ms a step", "speed of local", "range")
    for one in found:
        table.add_row(
            f"{one.away} of {one.sections}",
            f"{1e3 * statistics.median(one.local_seconds):.1f}",
            f"{1e3 * statistics.median(one.step_seconds):.1f}",
            f"{statistics.median(one.speeds):.3f}",
            f"{min(one.speeds):.2f}-{max(one.speeds):.2f}",
        )
    console = Console(width=110)
    console.print(machine.describe())
    console.print(table)
    if options.json is not None:
        report = {"machine": machine.describe(), "shares": [asdict(one) for one in found]}
        result_file.write(options.json, report)


if __name__ == "__main__":
    main()
