"""Environments of clients that others wrote, each apart from Kvell's and from each other."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvell.errors import ChangeSomething


@dataclass(frozen=True)
class Client:
    """A client and what it needs.

    :param packages: from PyPI, or from npm where the script is JavaScript.
    :param script: in ``smoke``.
    """

    packages: Sequence[str]
    script: str

    @property
    def is_javascript(self) -> bool:
        """Whether Node.js runs it."""
        return self.script.endswith(".mjs")


CLIENTS: Mapping[str, Client] = {
    "litellm": Client(["litellm"], "with_litellm.py"),
    "langchain": Client(["langchain", "langchain-openai"], "with_langchain.py"),
    "pydantic-ai": Client(["pydantic-ai-slim[openai]"], "with_pydantic_ai.py"),
    "openai-agents": Client(["openai-agents"], "with_openai_agents.py"),
    "instructor": Client(["instructor"], "with_instructor.py"),
    "outlines": Client(["outlines[openai]"], "with_outlines.py"),
    "lm-eval": Client(["lm_eval[api]", "transformers"], "with_lm_eval.py"),
    "inspect": Client(["inspect-ai", "openai"], "with_inspect.py"),
    "anthropic": Client(["anthropic"], "with_anthropic.py"),
    "ai-sdk": Client(["ai", "@ai-sdk/openai-compatible", "zod"], "with_ai_sdk.mjs"),
}
"""All of them, by name."""
SMOKE = Path(__file__).parent / "smoke"


def command_of(client: Client, directory: Path) -> list[str]:
    """The command that runs a client's checks; its environment is made if there is none.

    :param directory: of the environment.
    :raises ChangeSomething: if it cannot be installed.
    """
    if client.is_javascript:
        directory.mkdir(parents=True, exist_ok=True)
        script = directory / client.script  # node looks for packages beside the script
        script.write_text((SMOKE / client.script).read_text())
        if not (directory / "node_modules").exists():
            _run(["npm", "install", "--silent", "--prefix", str(directory), *client.packages])
        return ["node", str(script)]
    python = directory / "bin" / "python"
    if not (directory / "made").exists():
        _run([sys.executable, "-m", "venv", str(directory)])
        _run([str(python), "-m", "pip", "install", "-q", *client.packages])
        (directory / "made").touch()
    return [str(python), str(SMOKE / client.script)]


def versions_of(client: Client, directory: Path) -> list[str]:
    """The packages of a client with their versions."""
    if client.is_javascript:
        listed = _run(
            ["npm", "ls", "--prefix", str(directory), "--depth", "0", "--parseable=false"]
        )
        return sorted(line[4:] for line in listed.splitlines()[1:] if line.strip())
    python = directory / "bin" / "python"
    names = [one.partition("[")[0] for one in client.packages]
    lines = _run([str(python), "-m", "pip", "freeze"]).splitlines()
    wanted = {name.replace("_", "-").lower() for name in names}
    return [line for line in lines if line.partition("==")[0].replace("_", "-").lower() in wanted]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ChangeSomething("--env", command[0], f"it fails: {last}", "choose other --clients")
    return done.stdout
