"""What a step asked of the device, operation by operation, to compare one run with another."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

SYNCS = (
    "aten.item",
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique",
)
"""Operations that wait for the device, or whose result has a shape that data decides."""


class NotRepeatableError(AssertionError):
    """A step does what a record cannot repeat."""


@dataclass
class Tape:
    """The operations of a run, and the memory that they touched.

    :ivar lines: of each operation its name, the tensors that it read, and all other arguments.
    """

    lines: list[str] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)
    _made: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def note(self, name: str, arguments: Any, results: Any) -> None:
        if name.startswith("aten.lift_fresh"):
            raise NotRepeatableError(
                "a tensor is made of Python's numbers, which a record copies once"
            )
        if name.startswith(SYNCS):
            raise NotRepeatableError(f"{name} waits for the device")
        said = self._said(arguments)
        for result in _tensors(results):
            storage = result.untyped_storage()._cdata
            if storage not in self._numbers and not self._is_read(result, arguments):
                self._numbers[storage] = len(self._numbers)
                self._made.append(weakref.ref(result))
            self._kept.append(result)
        self.lines.append(f"{name}{said} -> {self._said(results)}")

    def end(self, outputs: Sequence[torch.Tensor]) -> None:
        """Check that of all that was made, nothing stays but the outputs."""
        self._kept.clear()
        kept = {output.untyped_storage()._cdata for output in outputs}
        for made in self._made:
            tensor = made()
            if tensor is not None and tensor.untyped_storage()._cdata not in kept:
                shape = tuple(tensor.shape)
                raise NotRepeatableError(
                    f"a tensor of {shape} stays, and the next run overwrites it"
                )

    def compare(self, other: "Tape") -> None:
        """Check that another run of the step did the same to the same memory."""
        for number, (one, two) in enumerate(zip(self.lines, other.lines, strict=False)):
            if one != two:
                raise NotRepeatableError(f"operation {number} was {one}, and is {two}")
        if len(self.lines) != len(other.lines):
            raise NotRepeatableError(f"{len(self.lines)} operations were {len(other.lines)}")

    @staticmethod
    def _is_read(result: torch.Tensor, arguments: Any) -> bool:
        storage = result.untyped_storage()._cdata
        return any(storage == one.untyped_storage()._cdata for one in _tensors(arguments))

    def _said(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            number = self._numbers.get(value.untyped_storage()._cdata)
            where = _address(value) if number is None else f"made {number}"
            place = f"{where}+{value.storage_offset()}"
            return f"<{place} {tuple(value.shape)} {value.stride()} {value.dtype} {value.device}>"
        if isinstance(value, dict):
            return str({name: self._said(part) for name, part in value.items()})
        if isinstance(value, list | tuple):
            return f"({', '.join(map(self._said, value))})"
        return repr(value)


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tape.note(str(func), (args, kwargs or {}), result)
        return result


def recorded(step: Callable[[], Sequence[torch.Tensor]]) -> tuple[Tape, Sequence[torch.Tensor]]:
    tape = Tape()
    with _Noting(tape):
        outputs = step()
    tape.end(outputs)
    return tape, outputs


@contextmanager
def one_launch(name: str, *arguments: Any) -> Iterator[Callable[[Any], None]]:
    """A kernel's launch: one operation, whatever its body does in torch.

    Call what is yielded with the results.
    """
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    tapes = [mode._tape for mode in modes if isinstance(mode, _Noting)]
    made: list[Any] = []
    with _disable_current_modes():
        yield made.append
    for tape in tapes:
        tape.note(name, arguments, tuple(made))


def _address(value: torch.Tensor) -> int:
    """Return where a tensor's memory begins; of a fake one, any number of its own."""
    storage = value.untyped_storage()
    address: int = storage._cdata if isinstance(value, FakeTensor) else storage.data_ptr()
    return address


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
