"""A server over map instances, as a process: prints its URL, ends on SIGTERM.

Arguments: ``API_KEY|- NUMBER_OF_INSTANCES`` and then the instances' own.
"""

import sys
from pathlib import Path

from kvell.server.run import ServeOptions, Texts, serve
from kvell.testing.instance import ByteText


def main() -> int:
    key, number, *instance_args = sys.argv[1:]
    root = Path(__file__).parents[3]  # the instance needs it, to import what tests share
    command = ["env", f"PYTHONPATH={root}", sys.executable, "-m", "tests.server.map.map_instance"]
    command += ["--socket-fd", "{socket_fd}"]
    command += ["--incarnation", "{incarnation}", *instance_args]
    options = ServeOptions(
        port=0, api_key=None if key == "-" else key, instances={"mixed": int(number)}
    )
    announce = lambda url: print(url, flush=True)  # noqa: E731, T201
    serve(command, Texts.of(ByteText()), options, announce)
    return 0


if __name__ == "__main__":
    sys.exit(main())
