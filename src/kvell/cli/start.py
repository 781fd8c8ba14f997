"""The start of the ``kvell`` command: an interrupt during imports ends it without a traceback."""

import os
import signal

INTERRUPTED = 130
"""The exit code of an interrupted command."""


def main() -> None:
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # not if interrupts are ignored, as under nohup
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    # Imported here: the imports take most of the first second.
    from kvell.cli.main import main as run

    signal.signal(signal.SIGINT, usual)
    run()


if __name__ == "__main__":
    main()
