"""Loading of a tokenizer in a thread, while weights are loaded.

Two threads that import from transformers at the same time may find its modules half made, so only
one loads a tokenizer, and imports of transformers' modelling code wait for it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from kvell.models.text.tokenizer import Tokenizer, tokenizer_or_none

_LOADING = Lock()


def load_early(path: Path, overrides: str | None) -> Future[Tokenizer]:
    """Start to load the tokenizer of a directory, as ``tokenizer_or_none`` does."""
    _LOADING.acquire()
    pool = ThreadPoolExecutor(1, "tokenizer")
    loading = pool.submit(tokenizer_or_none, path, overrides)
    loading.add_done_callback(lambda _: _LOADING.release())
    pool.shutdown(wait=False)
    return loading


def wait_until_loaded() -> None:
    """Wait for the tokenizer that a thread loads, if there is one."""
    with _LOADING:
        pass
