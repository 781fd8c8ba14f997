"""Benches accept the commands of ``docs/measured.md`` and ``bench/results/README.md``."""

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

COMMAND = re.compile(r"`(python -m bench\.[^`]*)`")
OPTIONAL = re.compile(r"[][]")
"""Brackets around flags that may be left out."""
PAGES = (Path("docs", "measured.md"), Path("bench", "results", "README.md"))
COMMANDS = sorted({command for page in PAGES for command in COMMAND.findall(page.read_text())})
PARSE = argparse.ArgumentParser.parse_args


class AcceptedError(Exception):
    """The command line has been parsed."""


def parse_alone(
    parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None
) -> Any:
    PARSE(parser, args, namespace)
    raise AcceptedError


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[2])
def test_its_bench_accepts_the_flags(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, module, *flags = shlex.split(OPTIONAL.sub("", command))
    monkeypatch.setattr(sys, "argv", [module, *flags])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    with pytest.raises(AcceptedError):
        runpy.run_module(module, run_name="__main__")
