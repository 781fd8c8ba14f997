"""Commands that accept other systems' flags, a configuration file and ``KVELL_…`` variables."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import click
from click.core import ParameterSource
from typing_extensions import override

from kvell.cli.terminal.help_groups import EXAMPLES, FIRST, group_of, in_order, place_of
from kvell.cli.terminal.progress import notice
from kvell.cli.terminal.session import Session
from kvell.cli.terminal.settings_files import variable_of, with_file, with_variables
from kvell.equivalents.dotted_flags import with_fields_as_json
from kvell.equivalents.entry import nearest, refusal
from kvell.equivalents.table import equivalent, kvell_value, words_of
from kvell.errors import ChangeSomething

ALL_OPTIONS = "all_options"
"""The key in a context's ``meta`` that makes help list all options."""
LEVEL = re.compile(r"-O\d")
"""vLLM's level of compilation in one word, like ``-O3``."""
MOST_LISTED = 20
"""The most options that ``--help`` lists without a choice."""


class EngineCommand(click.Command):
    """A command with flags of an engine.

    Values come from the command line, else from ``KVELL_…`` variables, else from ``--config``.
    Help lists the flags in groups: with ``--help`` the important ones, with ``--help-all`` all.
    """

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.params.append(_help_all_option())

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        session = ctx.ensure_object(Session)
        options = _options(self)
        words = list(_own_words(_whole_flags(args, options), options, session.notes))
        values, origins = with_file(_config_file(words), options, session.notes)
        values, origins = with_variables(session.environ, options, values, origins)
        session.notes.extend(_unknown_variables(session.environ, options))
        ctx.default_map = {**(ctx.default_map or {}), **values}
        try:
            return super().parse_args(ctx, words)
        except click.NoSuchOption as error:
            name = error.option_name
            raise click.NoSuchOption(name, None, nearest(name, options), error.ctx) from error
        except click.BadParameter as error:
            name = (error.param.name if error.param else "") or ""
            if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
                error.param_hint = f"'{origins.get(name, name)}'"
            raise
        except ChangeSomething as error:
            option = options.get(error.field)
            name = (option.name if option else "") or ""
            if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT_MAP:
                raise
            raise ChangeSomething(
                origins.get(name, name), error.value, error.problem, error.remedy
            ) from error

    @override
    def invoke(self, ctx: click.Context) -> Any:
        session = ctx.ensure_object(Session)
        if ctx.params.get("log_format") != "json":
            for sentence in session.notes:
                notice(sentence)
            session.notes.clear()
        return super().invoke(ctx)

    @override
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shows_all = bool(ctx.meta.get(ALL_OPTIONS)) or len(self.params) <= MOST_LISTED
        grouped: dict[str, list[tuple[str, str]]] = {}
        hidden = 0
        for param in sorted(self.get_params(ctx), key=place_of):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if not shows_all and not FIRST.intersection(param.opts):
                hidden += 1
                continue
            grouped.setdefault(group_of(param.opts), []).append(record)
        for group in in_order(grouped):
            with formatter.section(group):
                formatter.write_dl(grouped[group])
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{ctx.command_path} --help-all shows {hidden} more options.")
        if example := EXAMPLES.get(self.name or ""):
            with formatter.section("Example"):
                formatter.write_text(example)


def _help_all_option() -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
        if is_given and not ctx.resilient_parsing:
            ctx.meta[ALL_OPTIONS] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show all options and exit.",
    )


def _options(command: click.Command) -> dict[str, click.Option]:
    return {
        name: param
        for param in command.params
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }


def _whole_flags(args: Sequence[str], options: Mapping[str, click.Option]) -> list[str]:
    """Return the words with ``--flag.field VALUE`` as a JSON object."""

    def taken(flag: str) -> Literal["", "value", "json"]:
        if (option := options.get(flag)) is not None:
            if option.metavar == "JSON":
                return "json"
            return "" if option.is_flag or option.count else "value"
        entry = equivalent(flag) if flag.startswith("-") else None
        if entry is None:
            return ""
        return "json" if entry.is_json else "value" if entry.takes_value else ""

    return with_fields_as_json(args, taken)


def _own_words(
    args: Sequence[str], options: Mapping[str, click.Option], notes: list[str]
) -> Iterator[str]:
    """Yield the words with other systems' flags translated into options of the command.

    :param notes: lines about flags without effect are appended.
    :raises ChangeSomething: for flags and values that Kvell, or the command, refuses.
    """
    rest = iter(args)
    for word in rest:
        if word == "--":
            yield word
            yield from rest
            return
        flag, mark, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        option = options.get(flag)
        if option is not None:
            if option.is_flag or option.count:
                yield flag + mark + value
                continue
            given = value if mark else next(rest, None)
            yield flag
            if given is not None:
                yield kvell_value(flag, given)
            continue
        if LEVEL.fullmatch(flag):
            value = flag.removeprefix("-O")
            mark = "="
            flag = "-O"
        entry = equivalent(flag) if flag.startswith("-") else None
        if entry is None:
            yield word
            continue
        if entry.takes_value and not mark:
            value = next(rest, "")
            if not value:
                raise refusal(flag, value, "needs a value; leave it out if there is none")
        translated = entry.words(value, flag)
        for name, _ in translated:
            if name not in options:
                what = f"needs {name}, which only a server has; use kvell serve"
                raise refusal(flag, value, what)
        if entry.note:
            notes.append(entry.note)
        yield from words_of(translated)


def _config_file(words: Sequence[str]) -> str | None:
    """Return the value of ``--config`` among the words; None if it is not given."""
    return next((words[i + 1] for i, w in enumerate(words[:-1]) if w == "--config"), None)


def _unknown_variables(
    environ: Mapping[str, str], options: Mapping[str, click.Option]
) -> Iterator[str]:
    variables = {variable_of(name) for name in options}
    for variable in environ.keys() - variables:
        if close := nearest(variable, variables):
            yield f"{variable} is not read; the nearest variable is {close[0]}"
