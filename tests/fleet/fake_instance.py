"""A child process that serves a FakeEngine, at an inherited socket or where it listens.

Arguments are its settings.
"""

import argparse
import socket
import sys
from pathlib import Path

from kvell.engine.protocol.messages import SCHEMA_VERSION
from kvell.serving.fronts import FrontListener, read_secret
from kvell.serving.lone import serve_instance
from kvell.serving.loop import serve_fronts
from kvell.testing.instance import FakeEngine


def serve(args: argparse.Namespace, engine: FakeEngine) -> None:
    if not args.door:
        with socket.socket(fileno=args.socket_fd) as sock:
            serve_instance(engine, sock)
        return
    stdin = sys.stdin.fileno()
    secret = read_secret(stdin)
    if args.stays_away:
        sys.stdin.read()
    with FrontListener(args.door, secret, args.instance_id, args.incarnation) as door:
        door.ends_with(stdin)
        sys.stdout.write(f"{door.address}\n")
        sys.stdout.flush()
        serve_fronts(engine, door)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, default=-1)
    parser.add_argument("--door", default="", help="Listen at this address, not at a socket.")
    parser.add_argument("--instance-id", default="")
    parser.add_argument("--pool-host", default="")
    parser.add_argument("--says", help="A last word on stderr.")
    parser.add_argument("--stays-away", action="store_true", help="Never listen.")
    parser.add_argument("--incarnation", type=int, default=0)
    parser.add_argument("--credits", type=int, default=8)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--schema-version", type=int, default=SCHEMA_VERSION)
    parser.add_argument("--exit-at-start", type=int)
    parser.add_argument("--starts-once", help="A file: made at the first start; the next exit.")
    parser.add_argument("--beside", action="append", default=[])
    args = parser.parse_args()
    if args.says is not None:
        sys.stderr.write(f"{args.says}\n")
    if args.exit_at_start is not None:
        return int(args.exit_at_start)
    if args.starts_once is not None:
        if Path(args.starts_once).exists():
            return 1
        Path(args.starts_once).touch()
    engine = FakeEngine(
        credits=args.credits,
        step_seconds=args.step_seconds,
        incarnation=args.incarnation,
        schema_version=args.schema_version,
        beside=args.beside,
    )
    serve(args, engine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
