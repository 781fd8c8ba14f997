"""Files with recorded journals; ``python -m tests.journals.recording`` writes missing ones.

A file is kept while the code changes: it says what engines decided before.  Delete one only if its
decisions are meant to change, and say so in the commit.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.journals.cases import CASES, Recorded
from tests.journals.structure import Plain, described

FOLDER = Path(__file__).parents[1] / "data" / "journals"


class Described(NamedTuple):
    entries: list[Plain]
    plans: list[Plain]
    actions: list[Plain]


def path_of(case: str) -> Path:
    return FOLDER / f"{case}.msgpack.z"


def read(case: str) -> dict[str, Described]:
    data = zlib.decompress(path_of(case).read_bytes())
    return msgspec.msgpack.decode(data, type=dict[str, Described], strict=False)


def encode(recordings: Mapping[str, Recorded]) -> bytes:
    plain = {
        name: [[described(part) for part in parts] for parts in one]
        for name, one in recordings.items()
    }
    return zlib.compress(msgspec.msgpack.encode(plain), 9)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case, made in CASES.items():
        if not path_of(case).exists():
            path_of(case).write_bytes(encode(made.record()))
