"""A server that says and answers what its argument asks for, to try the check of servers with.

Its argument is JSON: ``answers`` (text by path), ``code`` (exit code at SIGTERM) and ``says`` (its
first line; by default its URL).
"""

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

ASKED = json.loads(sys.argv[1])


class Answer(BaseHTTPRequestHandler):
    """Gives the text of the path, or 404."""

    def do_GET(self) -> None:
        text = ASKED["answers"].get(self.path)
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> int:
    # Blocked in all threads, so that the signal waits until it is asked for.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    server = HTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    url = json.dumps({"url": f"http://127.0.0.1:{server.server_port}"})
    print("told on stderr", file=sys.stderr, flush=True)  # noqa: T201
    print(ASKED.get("says", url), flush=True)  # noqa: T201
    signal.sigwait({signal.SIGTERM})
    return int(ASKED["code"])


sys.exit(main())
