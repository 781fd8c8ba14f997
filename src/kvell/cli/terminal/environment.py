"""The only place that reads or sets environment variables."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

SPINS = "1000"
"""How often a waiting OpenMP thread looks before it sleeps: some microseconds.  With the
default of 300,000, two threads beside busy neighbours were ten times slower than one."""


def cache_dir(environ: Mapping[str, str], home: Path) -> Path:
    """Where converted weights are kept: ``KVELL_CACHE_DIR``, or ``kvell`` in the user's cache."""
    own = environ.get("KVELL_CACHE_DIR")
    if own:
        return Path(own)
    shared = environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else home / ".cache") / "kvell"


def prepare_libraries(environ: MutableMapping[str, str], cores: int) -> None:
    """Set what torch and tokenizers read when they load; what the user set stays.

    Must run before torch is imported.  Huge pages make weight reads 10-20 % faster;
    one thread per core that this process may use, since a runtime that spins on
    more than that loses most of its bandwidth.  Threads that wait sleep soon, so that
    a neighbour on the same cores costs its share and not everything.  The libraries
    stay quiet below errors: what goes wrong is said once, by the command.
    """
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    environ.setdefault("OMP_NUM_THREADS", str(cores))
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPINS)
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    environ.setdefault("HF_HUB_VERBOSITY", "error")


def prepare_process() -> None:
    """Apply :func:`prepare_libraries` to this process."""
    prepare_libraries(os.environ, len(os.sched_getaffinity(0)))


def process_cache_dir() -> Path:
    """This user's cache directory; it need not exist yet."""
    return cache_dir(os.environ, Path.home())
