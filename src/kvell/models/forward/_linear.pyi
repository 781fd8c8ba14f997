"""Types of the compiled module (csrc/linear/module.cpp)."""

def instruction_sets() -> list[str]: ...
def linear(
    instruction_set: str,
    weight: int,
    bias: int,
    x: int,
    y: int,
    out: int,
    in_: int,
    rows: int,
    x_stride: int,
    y_stride: int,
    num_threads: int,
) -> None: ...
