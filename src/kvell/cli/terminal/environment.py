"""The only module that reads or sets environment variables."""

import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

SPINS = "1000"
"""The number of spins of a waiting OpenMP thread before it sleeps: a few microseconds.  With the
default of 300,000, two threads next to other busy processes were ten times slower than one."""


def cache_dir(environ: Mapping[str, str], home: Path) -> Path:
    own = environ.get("KVELL_CACHE_DIR")
    if own:
        return Path(own)
    shared = environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else home / ".cache") / "kvell"


def prepare_libraries(environ: MutableMapping[str, str], cores: int) -> None:
    """Set the variables that torch and tokenizers read when they load; keep the user's values.

    It must run before torch is imported.  Huge pages make weight reads 10-20 % faster.  There is
    one thread per core that this process may use: with more, spinning threads lose most of the
    bandwidth.  Waiting threads sleep soon, so that another busy process on the same cores costs
    only its share.  The libraries log errors only: the command reports each problem once.
    """
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    environ.setdefault("OMP_NUM_THREADS", str(cores))
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPINS)
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    environ.setdefault("HF_HUB_VERBOSITY", "error")


def prepare_process() -> None:
    prepare_libraries(os.environ, len(os.sched_getaffinity(0)))


def take_processors(processors: Sequence[int], threads: int) -> None:
    """Run this process on the given processors, with ``threads`` threads in a step (0: one each).

    It must run before torch is imported.  A smaller number that the user set is kept.
    """
    os.sched_setaffinity(0, processors)
    share = threads or len(processors)
    given = os.environ.get("OMP_NUM_THREADS", "")
    os.environ["OMP_NUM_THREADS"] = str(min(int(given), share) if given.isdecimal() else share)


def take_threads(threads: int) -> None:
    """Set the number of threads in a step of this process, instead of its parent's.

    It must run before torch is imported.  Ray gives its actors a single thread.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)


def take_ray_token(token: str) -> None:
    """Require a token from clients of this process and of the Ray that it starts.

    It must run before Ray is imported.  A mode that the user set is kept.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = token


def has_ray_token() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "") == "token"


def ray_environment() -> dict[str, str]:
    return dict(os.environ)


def kvell_variables() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name.startswith("KVELL_")}


def given_columns(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the width in ``COLUMNS``; None if the variable has no positive number."""
    given = environ.get("COLUMNS", "")
    return int(given) if given.isdecimal() and int(given) else None


def process_cache_dir() -> Path:
    return cache_dir(os.environ, Path.home())


def tell_service_manager(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send systemd a state such as ``READY=1`` if it waits for one.

    By sd_notify(3), the state is a datagram to the socket in ``NOTIFY_SOCKET``; a missing receiver
    is not an error.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
