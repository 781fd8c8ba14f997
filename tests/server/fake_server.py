"""A whole server over fake instances, as a process: prints its URL, ends on SIGTERM.

Arguments: ``API_KEY|- PORT`` and then the instance's own.
"""

import itertools
import sys
from pathlib import Path

from kvell.errors import ChangeSomething
from kvell.fleet.started.front_limits import FrontLimits
from kvell.server.run import ServeOptions, Texts, serve
from kvell.testing.instance import ByteText


def main() -> int:
    key, port, *instance_args = sys.argv[1:]
    script = Path(__file__).parents[1] / "fleet" / "fake_instance.py"
    command = [sys.executable, str(script), "--socket-fd", "{socket_fd}"]
    command += ["--incarnation", "{incarnation}", *instance_args]
    beside = [ByteText(n) for f, n in itertools.pairwise(instance_args) if f == "--beside"]
    options = ServeOptions(
        port=int(port),
        api_key=None if key == "-" else key,
        max_body_bytes=100_000,
        limits=FrontLimits(max_waiting=2, drain_seconds=5),
    )
    try:
        announce = lambda url: print(url, flush=True)  # noqa: E731, T201
        serve(command, Texts.of(ByteText(), *beside), options, announce)
    except ChangeSomething as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
