"""A whole server over fake instances, with bounds of connections, as a process; its log is JSON.

Arguments: the fields of ``HttpBounds`` as JSON, and then the instance's own.  It prints its URL,
logs on stderr, and ends on SIGTERM.
"""

import json
import sys
from pathlib import Path

from kvell.fleet.started.front_limits import FrontLimits
from kvell.server.api.door.http_bounds import HttpBounds
from kvell.server.logs.lines import lines_on
from kvell.server.run import ServeOptions, Texts, serve
from kvell.testing.instance import ByteText

MAX_BODY_BYTES = 200_000


def main() -> None:
    bounds, *instance_args = sys.argv[1:]
    script = Path(__file__).parents[2] / "fleet" / "fake_instance.py"
    command = [sys.executable, str(script), "--socket-fd", "{socket_fd}"]
    command += ["--incarnation", "{incarnation}", *instance_args]
    options = ServeOptions(
        port=0,
        max_body_bytes=MAX_BODY_BYTES,
        limits=FrontLimits(drain_seconds=2),
        http=HttpBounds(**json.loads(bounds)),
    )
    announce = lambda url: print(url, flush=True)  # noqa: E731, T201
    with lines_on(sys.stderr, "json"):
        serve(command, Texts.of(ByteText()), options, announce)


if __name__ == "__main__":
    main()
