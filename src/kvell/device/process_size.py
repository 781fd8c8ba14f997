"""What this process takes of the machine's memory, as the system counts it."""

from pathlib import Path

from kvell.vocabulary import KIB

COUNTED = ("Pss_Anon:", "Pss_Shmem:")
"""Files that are mapped (libraries, weights as they lie on disk) can be given up at any time."""


def process_bytes(root: Path = Path("/")) -> int:
    """Anonymous and shared memory of this process, what it shares divided among all that do.

    0 where the system does not say.

    :param root: where ``proc`` lies.
    """
    try:
        lines = (root / "proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith(COUNTED))
