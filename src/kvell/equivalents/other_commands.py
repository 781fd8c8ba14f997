"""Commands of Ollama and vLLM that Kvell does not have, and what does the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvell.equivalents.entry import System
from kvell.errors import ChangeSomething

_HUB_CACHE = "models are in the hub's cache"


@dataclass(frozen=True)
class OtherCommand:
    """A command of another system.

    :param problem: what Kvell has instead.
    :param remedy: a command that does the same.
    """

    problem: str
    remedy: str
    system: System = "Ollama"

    def refusal(self, name: str) -> ChangeSomething:
        return ChangeSomething("command", name, f"is {self.system}'s: {self.problem}", self.remedy)


OTHER_COMMANDS: Mapping[str, OtherCommand] = MappingProxyType(
    {
        "run": OtherCommand(
            "Kvell talks or answers once",
            'use kvell chat MODEL, or kvell generate MODEL "PROMPT"',
        ),
        "pull": OtherCommand(
            "a model is downloaded from the hub when it is first used",
            "use kvell serve MODEL, or hf download MODEL",
        ),
        "list": OtherCommand(_HUB_CACHE, "use hf cache ls; a server lists its own at /v1/models"),
        "ls": OtherCommand(_HUB_CACHE, "use hf cache ls; a server lists its own at /v1/models"),
        "ps": OtherCommand(
            "a server has its models loaded as long as it runs",
            "use kvell top, or kvell cluster status",
        ),
        "show": OtherCommand(
            "a model's memory follows from its config",
            "use kvell plan MODEL; a server describes its own at /api/show",
        ),
        "stop": OtherCommand(
            "a server has its models loaded as long as it runs",
            "end kvell serve with Ctrl-C or SIGTERM",
        ),
        "rm": OtherCommand(_HUB_CACHE, "use hf cache rm"),
        "cp": OtherCommand(
            "a server gives its models names", "use kvell serve NAME=MODEL, or --served-model-name"
        ),
        "create": OtherCommand(
            "there are no model files of Kvell's own",
            "use the flags of kvell serve: --served-model-name, --chat-template, --config",
        ),
        "push": OtherCommand("models come from the hub", "use hf upload"),
        "complete": OtherCommand("completions have a command", "use kvell generate", "vLLM"),
        "run-batch": OtherCommand(
            "a file of prompts is answered by a command",
            "use kvell generate --prompts FILE",
            "vLLM",
        ),
    }
)
"""Commands by name."""
