"""Types of the compiled module (csrc/forward/module.cpp)."""

from collections.abc import Callable, Sequence

from kvell.models.partials._partials import Away

Norm = tuple[int, float]
Matrix = tuple[int, int, int, int, int, int]
Layer = tuple[int, int, int, int, int, int, int, int, int]
Memory = tuple[int, int]
Batch = tuple[int, int, int, int, int, int, int, int]
StateRows = tuple[int, int, int]
StatePages = tuple[StateRows, StateRows, int, int, int]
StateBatch = tuple[tuple[int, int, int], Sequence[int]]

def instruction_sets() -> list[str]: ...

class Forward:
    def __init__(
        self,
        instruction_set: str,
        element: int,
        sizes: tuple[int, int, int, int, int],
        activation: int,
        softcap: float,
        embedding: tuple[int, int, float],
        final_norm: Norm,
        head: Matrix,
    ) -> None: ...
    def add_rope(self, frequencies: Sequence[float], factor: float) -> None: ...
    def add_layer(
        self,
        norms: Sequence[Norm],
        matrices: Sequence[Matrix],
        factors: tuple[float, float],
        rope: int,
        rule: tuple[float, float, int],
    ) -> None: ...
    def add_mixer(
        self,
        sizes: tuple[int, int, int, int, int],
        constants: tuple[int, int, int, int, int],
        rule: tuple[float, float, bool, float],
        norm: Norm,
        out: Matrix,
    ) -> None: ...
    def attach(
        self, layers: Sequence[Layer], groups: Sequence[int], states: Sequence[StatePages]
    ) -> None: ...
    def workspace_bytes(self, tokens: int, rows: int) -> int: ...
    def attention_bytes(self, threads: int, longest_tokens: int) -> int: ...
    def attention_offsets(self, tokens: int, rows: int) -> tuple[int, int]: ...
    def run(
        self,
        tokens: tuple[int, int, int],
        rows: tuple[int, int],
        groups: Sequence[tuple[Batch, int, int]],
        states: Sequence[StateBatch],
        workspace: Memory,
        scratch: Memory,
        logits: int,
        wants_largest: bool,
        way: tuple[int, bool, int, int, int],
        hook: Callable[[int, int], None] | None,
        away: Away | None = None,
    ) -> tuple[int, list[int], int, list[int]]: ...
