"""What the documentation of the library says is so."""

import re
from pathlib import Path

from kvell.mempool.pool import MemPool

TABLE_1 = {
    "alloc_mem",
    "free_mem",
    "insert",
    "match",
    "delete",
    "swap_out",
    "swap_in",
    "transfer",
    "transfer_with_insert",
}
"""Of MemServe."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "mempool.md"


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(example, str(DOCUMENT), "exec"), {})


def test_every_call_of_the_table_is_there() -> None:
    calls = re.findall(r"^\| `(\w+)\(", DOCUMENT.read_text(), re.MULTILINE)
    assert set(calls) >= TABLE_1
    assert all(callable(getattr(MemPool, name)) for name in calls)
