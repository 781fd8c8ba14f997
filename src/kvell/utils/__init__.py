"""The parser of scripts' flags, by the names of vLLM's modules."""

from kvell.engine.arg_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
