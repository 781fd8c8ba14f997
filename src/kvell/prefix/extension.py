"""The import of the compiled memory core, which every installation has."""

from kvell.errors import ChangeSomething

try:
    from kvell.prefix import _core
except ImportError as error:
    raise ChangeSomething(
        "kvell.prefix._core",
        "missing",
        f"this installation lacks the compiled memory core ({error})",
        "install a wheel of Kvell, or install a C++ compiler and reinstall Kvell",
    ) from None

__all__ = ["_core"]
