"""Command-line parameters of sizes such as ``512MiB``, and of finite numbers."""

import math

import click

from kvell.byte_sizes import parse_bytes


class SizeType(click.ParamType[int]):
    """A click parameter that reads a size into bytes."""

    name = "size"

    def convert(
        self, value: float, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the bytes of :func:`parse_bytes`."""
        if isinstance(value, int):
            return value
        return parse_bytes(str(value), param.opts[0] if param else "size")


SIZE = SizeType()


class FiniteRange(click.FloatRange):
    """A range without ``inf`` and ``nan``, which pass click's bounds and are not JSON."""

    def convert(
        self, value: float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not finite.", param, ctx)
        return number


POSITIVE = FiniteRange(min=0, min_open=True)
