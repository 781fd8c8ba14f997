"""Arguments of engines as an object, and as flags of a script, as in vLLM."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Self

from typing_extensions import override

from kvell.byte_sizes import parse_bytes, parse_count
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.equivalents.table import EQUIVALENTS
from kvell.flags import Flag, settings_with_flag

DEFAULT_MODEL = "smollm2"


class EngineArgs:
    """Arguments of :class:`kvell.LLM` or :class:`kvell.AsyncEngine`, which check them.

    They are attributes of the object, so ``LLM(**vars(engine_args))`` is the same model.

    :param model: as for :class:`kvell.LLM`.
    :param arguments: further arguments of the class that the engine will have.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **arguments: object) -> None:
        self.__dict__.update({"model": model, **arguments})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each argument of ``LLM``, and for those of vLLM and SGLang."""
        group = parser.add_argument_group("engine")
        group.add_argument("--model", default=DEFAULT_MODEL)
        group.add_argument("--seed", type=int)
        for field, flag in settings_with_flag(EngineSettings):
            if flag.kind == "switch":
                group.add_argument(
                    *flag.names,
                    dest=field.name,
                    default=field.default,
                    action=argparse.BooleanOptionalAction,
                    help=flag.help,
                )
                continue
            group.add_argument(
                *flag.names,
                dest=field.name,
                default=field.default,
                choices=flag.choices or None,
                type=_parser_of(flag),
                help=flag.help.replace("%", "%%"),
            )
        own = frozenset(name for action in parser._actions for name in action.option_strings)
        for entry in EQUIVALENTS:
            names = [name for name in entry.names if name.startswith("--") and name not in own]
            action = "store" if entry.takes_value else "store_true"
            for name in names:
                group.add_argument(
                    name, default=argparse.SUPPRESS, help=entry.sentence, action=action
                )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the arguments that the flags of :meth:`add_cli_args` gave."""
        parser = cls.add_cli_args(argparse.ArgumentParser(add_help=False))
        names = {action.dest for action in parser._actions} | {"runner"}
        return cls(**{name: value for name, value in vars(args).items() if name in names})


AsyncEngineArgs = EngineArgs


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes ``--max_num_seqs`` for ``--max-num-seqs``."""

    @override
    def parse_known_args(  # type: ignore[override] # typeshed has overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse words of a command line; see the class."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(word) for word in words], namespace)


def _with_dashes(word: str) -> str:
    flag, mark, value = word.partition("=")
    return flag.replace("_", "-") + mark + value if flag.startswith("--") else word


def _count(text: str) -> int | None:
    if text in ("auto", "-1"):
        return None
    count = parse_count(text)
    if count is None:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number; write it like 8192 or 8k")
    return count


def _parser_of(flag: Flag) -> Callable[[str], object]:
    if flag.kind == "bytes":
        return lambda text: parse_bytes(text, flag.name)
    if flag.kind in ("length", "integer"):
        return _count
    return float if flag.kind in ("seconds", "number") else str
