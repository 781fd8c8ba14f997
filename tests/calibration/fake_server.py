"""A server over a fake instance that tells its URL as ``kvell serve --json`` does."""

import json
import sys
from pathlib import Path

from kvell.server.run import ServeOptions, Texts, serve
from kvell.testing.instance import ByteText


def main() -> None:
    script = Path(__file__).parents[1] / "fleet" / "fake_instance.py"
    command = [sys.executable, str(script), "--socket-fd", "{socket_fd}"]
    command += ["--incarnation", "{incarnation}", "--step-seconds", "0.001"]
    told = lambda url: print(json.dumps({"url": url}), flush=True)  # noqa: E731, T201
    serve(command, Texts.of(ByteText()), ServeOptions(port=0), told)


if __name__ == "__main__":
    main()
