"""Tensors over addresses that torch did not allocate, by the DLPack protocol."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

CPU, CUDA = 1, 2
BYTES = (1, 8, 1)
"""DLPack's numbers of unsigned bytes: code, bits, lanes."""
make_capsule: Callable[..., Any] = ctypes.pythonapi.PyCapsule_New
make_capsule.restype = ctypes.py_object  # type: ignore[attr-defined]
make_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)  # type: ignore[attr-defined]


class Described(ctypes.Structure):
    """``DLManagedTensor`` without a function that frees it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class AddressedBytes:
    """Bytes of a device at an address, which may lie there in part only.

    :ivar tensor: uint8 [size_bytes]; valid while this object is.
    """

    def __init__(self, address: int, size_bytes: int, device: torch.device) -> None:
        """Describe the bytes; nothing is read.

        :param device: of one GPU of CUDA, or the CPU.
        """
        kind = CUDA if device.type == "cuda" else CPU
        self._shape = (ctypes.c_int64 * 1)(size_bytes)
        self._described = Described(
            address, kind, device.index or 0, 1, *BYTES, self._shape, None, 0, None, None
        )
        address_of = ctypes.addressof(self._described)
        self.tensor: torch.Tensor = from_dlpack(make_capsule(address_of, b"dltensor", None))

    def __del__(self) -> None:
        """Free the tensor before its description, which torch reads then."""
        del self.tensor
