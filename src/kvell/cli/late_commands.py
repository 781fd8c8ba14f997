"""Commands that are imported when they are used, so that a command imports no others."""

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from types import MappingProxyType

import click
from typing_extensions import override

from kvell.equivalents.table import OTHER_COMMANDS

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "bench": ("bench.commands", "Measure a server or an engine under load."),
        "calibrate": ("calibrate", "Time this machine's steps, for kvell replay."),
        "chat": ("chat", "Talk with a model."),
        "cluster": ("cluster.commands", "Operate a running server."),
        "generate": ("generate", "Answer a text, or a file of prompts."),
        "instance": ("instance", ""),
        "meet": ("cluster.meet", ""),
        "plan": ("plan.command", "Show which requests fit into memory."),
        "plot": ("plot", "Draw timelines of replays side by side."),
        "replay": ("replay.command", "Replay a trace in virtual time."),
        "serve": ("serve", "Serve the OpenAI API over HTTP."),
        "top": ("top.command", "Watch a running server."),
    }
)
"""The module of each command, and its line in help; hidden commands have none."""


class LateCommands(MutableMapping[str, click.Command]):
    """Commands by name; each is imported when it is read."""

    def __init__(self) -> None:
        self._more: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name in self._more:
            return self._more[name]
        module, _ = COMMANDS[name]
        command: click.Command = getattr(import_module(f"kvell.cli.{module}"), name)
        return command

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._more[name] = command

    def __delitem__(self, name: str) -> None:
        del self._more[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*COMMANDS, *self._more])

    def __len__(self) -> int:
        return len(COMMANDS) + len(self._more)


class LateGroup(click.Group):
    """A group of :class:`LateCommands`, whose help imports none of them."""

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names.

        :raises ChangeSomething: if it is a command of another system.
        """
        if args[0] not in COMMANDS and args[0] in OTHER_COMMANDS:
            raise OTHER_COMMANDS[args[0]].refusal(args[0])
        return super().resolve_command(ctx, args)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items() if line])
