"""A neighbour: another program that is busy all the time.  No torch here."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SCRIPT = """
import os
processors = {processors}
if processors:
    os.sched_setaffinity(0, processors)
print("busy", flush=True)
while True: pass
"""


@contextmanager
def busy_program(processor: int | None = None) -> Iterator[None]:
    """Run it beside what follows.

    :param processor: the only one that it may use; None: any.
    """
    script = _SCRIPT.format(processors=[] if processor is None else [processor])
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == b"busy\n"
            yield
        finally:
            program.kill()
