"""Options of a bench: the source of its requests, and the destination of its figures."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvell.cli.terminal.files import require_directory, writing
from kvell.cli.terminal.progress import notice
from kvell.errors import ChangeSomething
from kvell.flags import setting

USUAL_REQUESTS = 200
USUAL_PROMPT, USUAL_OUTPUT = "256", "128"
STDOUT = "-"


@dataclass(frozen=True)
class Source:
    """The flags that choose the requests."""

    workload: str | None = setting(
        None, "--workload", "A workload of `kvell bench workloads`.", metavar="NAME"
    )
    trace: Path | None = setting(
        None, "--trace", "A trace file, as `kvell replay` reads it.", "file"
    )
    block_tokens: int | None = setting(
        None,
        "--block-tokens",
        "Tokens of a block of a trace's hash_ids.  [default: as its format or the trace says]",
        "integer",
        metavar="N",
    )
    prompt_tokens: str | None = setting(
        None,
        "--prompt-tokens",
        "Unrelated prompts: 512, 128:512, normal:MEAN:SD, lognormal:…, exponential:MEAN.",
        metavar="DIST",
    )
    output_tokens: str | None = setting(
        None, "--output-tokens", "Lengths of outputs, in the same forms.", metavar="DIST"
    )
    num_requests: int | None = setting(
        None,
        "--num-requests",
        f"Maximum number of requests.  [default: {USUAL_REQUESTS}, or all of a trace]",
        "integer",
        alias="--limit",
    )
    seed: int = setting(
        0, "--seed", "The same seed makes the same requests.", "integer", metavar="", least=0
    )

    @property
    def name(self) -> str:
        if self.trace is not None:
            return self.trace.name
        lengths = (
            f"{self.prompt_tokens or USUAL_PROMPT} in, {self.output_tokens or USUAL_OUTPUT} out"
        )
        return self.workload or lengths

    def rows(self) -> Any:
        """Return the requests, sorted by arrival.

        :raises ChangeSomething: if the source does not exist, or its requests cannot be sent.
        """
        rows = self._rows()
        if any(row.images for row in rows):
            field = "--trace" if self.trace else "--workload"
            problem = "has images, which are not sent yet"
            raise ChangeSomething(field, self.name, problem, "use one of text alone")
        return rows

    def _rows(self) -> Any:
        from kvell.simulator.traces.generators import generate_trace
        from kvell.simulator.traces.trace import read_trace

        lengths = self.prompt_tokens or self.output_tokens
        if sum(map(bool, (self.workload, self.trace, lengths))) != 1:
            raise click.UsageError(
                "Give one of --workload, --trace, or --prompt-tokens with --output-tokens."
            )
        if self.trace is not None:
            return read_trace(
                self.trace, self.num_requests, notice=notice, block_tokens=self.block_tokens
            )
        if self.block_tokens is not None:
            raise ChangeSomething(
                "--block-tokens", self.block_tokens, "is of trace files", "give --trace"
            )
        count = self.num_requests or USUAL_REQUESTS
        if self.workload is None:
            return self._drawn(count)
        try:
            return generate_trace(self.workload, count, self.seed)
        except ChangeSomething as error:
            raise ChangeSomething("--workload", error.value, "is none", error.remedy) from error

    def _drawn(self, count: int) -> Any:
        import numpy as np

        from kvell.simulator.traces.distributions import independent, parse_distribution

        prompts = parse_distribution(self.prompt_tokens or USUAL_PROMPT, "--prompt-tokens")
        outputs = parse_distribution(self.output_tokens or USUAL_OUTPUT, "--output-tokens")
        return independent(prompts, outputs, np.random.default_rng(self.seed), count)


vocab_size_option = click.option(
    "--vocab-size",
    type=click.IntRange(min=2),
    default=32_000,
    show_default=True,
    help="Token ids of prompts are below it.",
)
results_option = click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value=STDOUT,
    metavar="[FILE|-]",
    help="Write JSON to a file, or to stdout instead of tables.",
)


def check_results(json_path: str | None) -> None:
    """Check the file of ``--json`` before the run, so that a typing error does not cost a run.

    :raises ChangeSomething: if the file's directory does not exist.
    """
    if json_path not in (None, STDOUT):
        require_directory("--json", Path(str(json_path)))


def give_results(
    report: Mapping[str, Any], json_path: str | None, print_tables: Callable[[], None]
) -> None:
    """Write the report as JSON if asked for; print tables unless JSON goes to stdout."""
    text = json.dumps(report)
    if json_path == STDOUT:
        click.echo(text)
        return
    if json_path is not None:
        with writing("--json", Path(json_path)):
            Path(json_path).write_text(text + "\n", encoding="utf-8")
    print_tables()
