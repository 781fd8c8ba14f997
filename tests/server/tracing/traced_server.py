"""A whole server over fake instances whose requests are traced, as a process; its log is JSON.

Arguments: the collector's address, ``-`` for none, and then the instance's own.  It prints its URL
and what was imported of tracing, and ends on SIGTERM.
"""

import sys
from pathlib import Path

from kvell.fleet.started.front_limits import FrontLimits
from kvell.server.logs.lines import lines_on
from kvell.server.run import ServeOptions, Texts, serve
from kvell.testing.instance import ByteText


def imported() -> list[str]:
    heavy = ("kvell.server.tracing", "opentelemetry.sdk", "opentelemetry.exporter")
    return [name for name in sorted(sys.modules) if name.startswith(heavy)]


def announce(url: str) -> None:
    print(url, *imported(), flush=True)  # noqa: T201


def main() -> None:
    endpoint, *instance_args = sys.argv[1:]
    script = Path(__file__).parents[2] / "fleet" / "fake_instance.py"
    command = [sys.executable, str(script), "--socket-fd", "{socket_fd}"]
    command += ["--incarnation", "{incarnation}", *instance_args]
    options = ServeOptions(
        port=0,
        api_key="the-key-of-all",
        limits=FrontLimits(max_waiting=2, drain_seconds=5),
        otlp_traces_endpoint=None if endpoint == "-" else endpoint,
    )
    with lines_on(sys.stderr, "json"):
        serve(command, Texts.of(ByteText()), options, announce)


if __name__ == "__main__":
    main()
