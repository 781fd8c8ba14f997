"""A whole server over fake instances with a file of keys, as a process; its log is JSON on stderr.

Arguments: ``KEY_FILE|-`` and then the instance's own.
"""

import sys
from pathlib import Path

from kvell.server.logs.lines import lines_on
from kvell.server.run import ServeOptions, Texts, serve
from kvell.testing.instance import ByteText


def main() -> None:
    key_file, *instance_args = sys.argv[1:]
    script = Path(__file__).parents[1] / "fleet" / "fake_instance.py"
    command = [sys.executable, str(script), "--socket-fd", "{socket_fd}"]
    command += ["--incarnation", "{incarnation}", *instance_args]
    options = ServeOptions(
        port=0,
        api_key_file=None if key_file == "-" else Path(key_file),
        log_requests=True,
        stats_seconds=0.02,
    )
    with lines_on(sys.stderr, "json"):
        serve(command, Texts.of(ByteText()), options)


if __name__ == "__main__":
    main()
