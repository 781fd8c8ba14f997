"""The end of a command: exit codes, and one line for a user who must change something.

=====================  ====  =========================================
what happened          code  stderr
=====================  ====  =========================================
done                   0     nothing
the user must change   2     one line: field, value, problem, remedy
something
try later, a bug       1     one line; ``--debug`` shows the traceback
interrupted            130   nothing
=====================  ====  =========================================
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import click

from kvell.errors import ChangeSomething, KvellError

DONE, BUG, CHANGE, INTERRUPTED = 0, 1, 2, 130

_FLAGS = {"kv_memory_bytes": "--kv-memory"} | {
    name: "--" + name.replace("_", "-")
    for name in tuple(
        (
            "model dtype kv_cache_dtype quantization device max_model_len max_num_batched_tokens "
            "max_num_seqs num_speculative_tokens speculative_model prompt_lookup_max "
            "prompt_lookup_min manager temperature top_k top_p seed max_tokens stop ignore_eos "
            "host port api_key chat_template served_model_name pd_caching adaptive_roles relief "
            "root_path allowed_hosts allowed_origins allowed_methods allowed_headers"
        ).split()
    )
}


@dataclass
class Debug:
    """The switch for tracebacks; ``--debug`` turns it on anywhere on the command line."""

    on: bool = False


def run_guarded(work: Callable[[], object], debug: Debug) -> int:
    try:
        work()
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return CHANGE
    except click.ClickException as error:
        return _say(_with_help(error), CHANGE, debug)
    except ChangeSomething as error:
        return _say(as_flags(error), CHANGE, debug)
    except KvellError as error:
        return _say(str(error), BUG, debug)
    except Exception as error:
        text = f"this is a bug: {type(error).__name__}: {error} (--debug shows where)"
        return _say(text, BUG, debug)
    return DONE


def as_flags(error: ChangeSomething) -> str:
    field = _FLAGS.get(error.field, error.field)
    return f"{field}={error.value}: {error.problem}; {error.remedy}"


def _with_help(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        [near, *_] = error.possibilities
        return f"No such option '{error.option_name}'; did you mean {near}?"
    context = error.ctx if isinstance(error, click.UsageError) else None
    place = f"; see {context.command_path} --help" if context else ""
    return error.format_message().rstrip(".") + place


def _say(text: str, code: int, debug: Debug) -> int:
    if debug.on:
        traceback.print_exc()
    click.echo("kvell: " + " ".join(text.split()), err=True)
    return code


def _reader_left() -> int:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE
