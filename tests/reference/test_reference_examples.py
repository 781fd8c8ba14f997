"""Examples in documents: commands and flags exist, Python compiles, names and arguments exist.

What runs without a model is run elsewhere: the memory core's page in ``test_prefix_library.py``.
"""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import click
import pytest

import kvell
from kvell.cli.main import root
from kvell.engine.setup.arguments.settings_from import SIZES
from kvell.engine.setup.engine_settings import EngineSettings

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = [
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "bench").glob("*/README.md")),
    *sorted((REPOSITORY / "src" / "kvell").glob("*/README.md")),
]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fenced(language: str) -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        text = document.read_text()
        for match in FENCE.finditer(text):
            if match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                yield f"{document.relative_to(REPOSITORY)}:{line}", match[2]


def commands() -> list[tuple[str, list[str]]]:
    """Calls of ``kvell`` in documents, as words."""
    found = []
    for place, block in fenced("console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ kvell "):
                words = shlex.split(line.removeprefix("$ kvell "), comments=True)
                found.append((place, words))
    return found


def problem(words: list[str]) -> str | None:
    """What is wrong with the words behind ``kvell``; None if nothing is."""
    command: click.Command = root
    rest = list(words)
    while isinstance(command, click.Group):
        if not rest or rest[0] not in command.commands:
            return f"no command {' '.join(words)}"
        command = command.commands[rest.pop(0)]
    known = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    unknown = [flag for flag in flags if flag not in known]
    return f"no flag {unknown[0]}" if unknown else None


def test_commands_in_documents_exist_with_their_flags() -> None:
    found = commands()
    assert len(found) > 15
    assert [(place, problem(words)) for place, words in found if problem(words)] == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("serve --port 1", None),
        ("cluster scale mixed=2", None),
        ("generate --no-async-scheduling hi", None),
        ("serve --prot 1", "no flag --prot"),
        ("server --port 1", "no command server --port 1"),
        ("cluster", "no command cluster"),
    ],
)
def test_what_does_not_exist_is_told(line: str, told: str | None) -> None:
    assert problem(shlex.split(line)) == told


PYTHON = list(fenced("python"))
CLASSES = {name: getattr(kvell, name) for name in kvell.__all__ if name != "__version__"}


def parsed(block: str) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(block, "example", "exec", flags)
    assert isinstance(tree, ast.Module)
    return tree


@pytest.mark.parametrize("block", [block for _, block in PYTHON], ids=[p for p, _ in PYTHON])
def test_what_examples_import_and_give_exists(block: str) -> None:
    for node in ast.walk(parsed(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvell"):
            module = import_module(str(node.module))
            assert [one.name for one in node.names if not hasattr(module, one.name)] == []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert unknown_arguments(node.func.id, node) == []


def unknown_arguments(name: str, call: ast.Call) -> list[str]:
    """Arguments by name that a public class does not take."""
    if name not in CLASSES:
        return []
    parameters = inspect.signature(CLASSES[name]).parameters
    takes_settings = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    settings = (
        {one.name for one in fields(EngineSettings)} | SIZES.keys() if takes_settings else set()
    )
    given = [one.arg for one in call.keywords if one.arg is not None]
    return [one for one in given if one not in parameters and one not in settings]


def test_an_argument_that_is_not_there_is_told() -> None:
    call = ast.parse("SamplingParams(temprature=0, top_k=3)", mode="eval").body
    assert isinstance(call, ast.Call)
    assert unknown_arguments("SamplingParams", call) == ["temprature"]
    assert unknown_arguments("LLM", call) == ["temprature", "top_k"]
    assert unknown_arguments("somebody_else", call) == []


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 4
    assert {place.partition(":")[0] for place, _ in PYTHON} > {
        "README.md",
        "docs/chat.md",
        "docs/instances.md",
    }
