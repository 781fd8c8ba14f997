"""Types of the compiled module (csrc/partials/module.cpp)."""

from collections.abc import Callable, Sequence

Layer = tuple[int, int, int, int, int, int, int, int, int]
ServedRule = tuple[float, float, int]
AwayRun = tuple[int, int, int, int, Sequence[int]]

class Creditor: ...

class CalledCreditor(Creditor):
    def __init__(
        self,
        room_bytes: int,
        post: Callable[[bytes], bool],
        take: Callable[[float], bytes | None],
    ) -> None: ...

class Away:
    def __init__(self, creditors: Sequence[Creditor], number: int) -> None: ...
    def expect(self, runs: Sequence[AwayRun], patience_seconds: float) -> None: ...
    def missed(self) -> list[int]: ...

class Service:
    def __init__(
        self,
        instruction_set: str,
        element: int,
        heads: int,
        layers: Sequence[tuple[Layer, ServedRule, int]],
        words: tuple[int, int],
    ) -> None: ...
    def lend(self, right: int, debtor: int, pages: Sequence[Sequence[int]]) -> None: ...
    def end(self, right: int, seconds: float) -> bool: ...
    def reading(self) -> int: ...
    def wrong(self) -> int: ...
    def answer(self, debtor: int, query: bytes) -> bytes: ...
