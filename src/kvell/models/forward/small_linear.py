"""Linears for few rows in bfloat16 on a CPU, where a decode step mostly reads weights.

torch reads them at a third of the memory's bandwidth while rows are few.  The
compiled kernel (csrc/linear) reaches most of it and reads torch's own tensors:
nothing is packed or copied.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

try:
    from kvell.models.forward import _linear
except ImportError:  # built without a compiler
    _INSTRUCTION_SETS: tuple[str, ...] = ()
else:
    _INSTRUCTION_SETS = tuple(_linear.instruction_sets())

FASTER_SETS = ("avx512", "avx2")
"""Instruction sets whose kernel was measured to beat torch's own; with others torch's is used."""

MAX_ROWS = 32
"""Above this, arithmetic is the limit, and torch's own is as fast (ADR 11)."""

ONE_THREAD_BYTES = 512 << 10
"""Smaller weights are read before a second thread has woken up."""


def instruction_sets() -> tuple[str, ...]:
    return _INSTRUCTION_SETS


class SmallBatchLinear(nn.Linear):
    """A linear that shares another's parameters and runs few rows by the compiled kernel.

    Unsupported inputs (more rows than ``MAX_ROWS``, other dtypes or devices, gradients) are
    computed by torch.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate a second weight
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)
        self.num_threads = 1 if linear.weight.nbytes < ONE_THREAD_BYTES else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if not self._is_small(x, weight, bias):
            return functional.linear(x, weight, bias)
        return small_linear(x, weight, bias, _INSTRUCTION_SETS[0], self.num_threads)

    def _is_small(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Return whether the kernel may run it; torch refuses wrong shapes."""
        out, width = weight.shape
        return (
            0 < x.numel() <= MAX_ROWS * width
            and x.shape[-1] == width
            and x.dtype == torch.bfloat16
            and x.is_cpu
            and _is_kernels(weight)
            and (bias is None or (_is_kernels(bias) and bias.shape[0] == out))
            and not (torch.is_grad_enabled() and self._wants_gradients(x))
        )

    def _wants_gradients(self, x: torch.Tensor) -> bool:
        return x.requires_grad or any(p.requires_grad for p in self.parameters())


def use_small_linears(module: nn.Module) -> int:
    """Swap every bfloat16 CPU linear inside a module; return how many were swapped.

    A linear that is used in several places stays one; parameters stay the same objects under the
    same names. Not swapped: subclasses of ``nn.Linear``, linears with hooks, and any linear if the
    kernel is missing or not faster.
    """
    swapped: dict[nn.Linear, SmallBatchLinear] = {}
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if not name or type(child) is not nn.Linear or not _may_swap(child):
            continue
        if child not in swapped:
            swapped[child] = SmallBatchLinear(child)
        module.set_submodule(name, swapped[child])
    return len(swapped)


def _may_swap(linear: nn.Linear) -> bool:
    hooks: Any = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks)
    return (
        any(name in FASTER_SETS for name in _INSTRUCTION_SETS[:1])
        and "forward" not in vars(linear)
        and not any(hooks)
        and _is_kernels(linear.weight)
        and (linear.bias is None or _is_kernels(linear.bias))
    )


def _is_kernels(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.is_cpu and tensor.is_contiguous()


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    instruction_set: str,
    num_threads: int = 0,
) -> torch.Tensor:
    """Compute ``x · weightᵀ + bias`` by the compiled kernel, for any number of rows.

    Sums are float32 and rounded once. Within one instruction set an output depends on its row and
    column alone: rows and threads do not change a bit of it.

    :param x: [..., in]; copied if its rows are not contiguous or not evenly spaced.
    :param num_threads: 0 for OpenMP's number, which ``torch.set_num_threads`` sets.
    """
    out, width = weight.shape
    y = x.new_empty((*x.shape[:-1], out))
    if x.is_contiguous():  # a reshape costs as much as reading a small linear's weight
        rows = x.numel() // width
        stride = width
    else:
        x = x.reshape(-1, width)
        x = x if x.stride(1) == 1 else x.contiguous()
        rows = x.shape[0]
        stride = x.stride(0)
    _linear.linear(
        instruction_set,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        x.data_ptr(),
        y.data_ptr(),
        out,
        width,
        rows,
        stride,
        out,
        num_threads,
    )
    return y
