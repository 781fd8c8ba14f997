"""``kvell generate``: an answer to one prompt, or to each prompt of a file."""

import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvell.cli.prompts_file import PromptLine, read_prompts
from kvell.cli.terminal.commands import EngineCommand
from kvell.cli.terminal.options import (
    DEFAULT_MODEL,
    config_option,
    engine_options,
    json_option,
    sampling_options,
    with_kv_memory,
)
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.engine_settings import EngineSettings

if TYPE_CHECKING:
    from kvell.llm import LLM

MAX_PIPED_CHARACTERS = 16 << 20
"""The most characters that are read from stdin as one text."""
RESULT_FIELDS = (
    "index",
    "prompt_token_ids",
    "token_ids",
    "text",
    "cached_tokens",
    "preemptions",
    "finish_reason",
)


ENDS = {
    "stop": "the model ended its answer",
    "length": "cut at the limit of tokens; --max-tokens raises it",
}
"""Lines for the end of an answer, by its reason."""


class WithReturn:
    """The pieces of an answer, and the value that their generator returns."""

    def __init__(self, pieces: Generator[str, None, str | None]) -> None:
        self._pieces = pieces
        self.returned: str | None = None

    def __iter__(self) -> Iterator[str]:
        self.returned = yield from self._pieces


@dataclass(frozen=True)
class Job:
    """The prompts to answer, and the format of the output."""

    prompt: str | None
    lines: Sequence[PromptLine]
    sampling: SamplingParams
    as_json: bool
    sequential: bool
    raw: bool


@click.command(cls=EngineCommand)
@click.argument("words", nargs=-1, metavar="[MODEL] [TEXT]")
@config_option
@click.option("--prompt", help="Text to answer; the same as TEXT.")
@click.option(
    "--prompts", "path", metavar="FILE", help='File of lines {"prompt": …}; - reads stdin.'
)
@sampling_options(temperature=0.0, top_p=1.0)
@click.option("--stop", multiple=True, help="Stop before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Continue past the end-of-sequence token.")
@click.option("--sequential", is_flag=True, help="Run one request after the other.")
@click.option("--raw", is_flag=True, help="Give --prompt to the model without its chat template.")
@json_option
@engine_options
@click.pass_obj
def generate(
    session: Session,
    /,
    settings: EngineSettings,
    words: tuple[str, ...],
    prompt: str | None,
    path: str | None,
    as_json: bool,
    sequential: bool,
    raw: bool,
    **sampling: Any,
) -> None:
    """Answer TEXT, a file of prompts, or the text on stdin.

    A single argument is TEXT, unless it is a model and the text comes from elsewhere.
    """
    model, text = split_words(words, has_text=prompt is not None or path is not None)
    settings = settings if model is None else replace(settings, model=model)
    if sum(given is not None for given in (text, prompt, path)) > 1:
        raise click.UsageError("Give one of TEXT, --prompt and --prompts.")
    prompt = text if prompt is None else prompt
    if prompt is None and path is None:
        prompt = piped_text()
    lines = read_prompts(path) if path is not None else []
    job = Job(prompt, lines, SamplingParams(**sampling), as_json, sequential, raw)
    started_seconds = session.clock.now_seconds()
    with progress_bar("loading") as report:
        chosen = with_kv_memory(settings, session)
        model = session.open_model(chosen, session.cache_dir, report, reads_text=True)
    if job.prompt is not None and not job.as_json:
        _answer(model, job, session, started_seconds)
    else:
        _run_all(model, job)


def split_words(words: Sequence[str], *, has_text: bool) -> tuple[str | None, str | None]:
    """Return the model and the text among the arguments; None for those not given."""
    if len(words) > 2:
        raise click.UsageError("Give MODEL and TEXT; put quotation marks around a text.")
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return None, None
    is_name = has_text and not any(map(str.isspace, words[0]))
    is_model = is_name or words[0] == DEFAULT_MODEL or Path(words[0]).is_dir()
    return (words[0], None) if is_model else (None, words[0])


def piped_text() -> str:
    """Return the text on stdin.

    :raises click.UsageError: if stdin is a terminal or empty.
    """
    text = "" if sys.stdin.isatty() else sys.stdin.read(MAX_PIPED_CHARACTERS).strip()
    if not text:
        raise click.UsageError("Give one of TEXT, --prompt and --prompts, or a text on stdin.")
    return text


def _answer(model: "LLM", job: Job, session: Session, started_seconds: float) -> None:
    """Stream one answer, after the memory contract and before hints at further commands."""
    _note(*model.contract.lines(), "")
    first_seconds = None
    pieces = WithReturn(model.stream(prompt_input(model, job), job.sampling))
    for text in pieces:
        first_seconds = first_seconds or session.clock.now_seconds()
        click.echo(text, nl=False)
    click.echo()
    end_seconds = session.clock.now_seconds()
    _note(
        "",
        ENDS.get(pieces.returned or "", ""),
        f"first words {(first_seconds or end_seconds) - started_seconds:.1f} s after the start, "
        f"{end_seconds - (first_seconds or end_seconds):.1f} s of writing",
        f"next: {session.program} chat    or: {session.program} serve    "
        f"or: {session.program} --help",
    )


def prompt_input(model: "LLM", job: Job) -> Any:
    """Return the token ids of ``--prompt``, int32 ``[n]``, in the chat template if there is one."""
    if job.raw or not model.tokenizer.has_chat_template:
        return model.tokenizer.encode(job.prompt or "")
    return model.tokenizer.encode_chat([{"role": "user", "content": job.prompt or ""}])


def _run_all(model: "LLM", job: Job) -> None:
    if job.prompt is not None:
        prompts, sampling = [prompt_input(model, job)], [job.sampling]
    else:
        prompts = [_asked(line) for line in job.lines]
        limits = [line.max_tokens or job.sampling.max_tokens for line in job.lines]
        sampling = [replace(job.sampling, max_tokens=limit) for limit in limits]
    results = model.generate(prompts, sampling, sequential=job.sequential)
    if job.as_json:
        click.echo(as_json(results, model.stats()))
    else:
        for result in results:
            click.echo(f"[{result.index}] {result.text}")


def _asked(line: PromptLine) -> Any:
    if not line.model:
        return line.prompt
    key = "prompt" if isinstance(line.prompt, str) else "prompt_token_ids"
    return {key: line.prompt, "model": line.model}


def as_json(results: Sequence[Any], stats: Mapping[str, Any]) -> str:
    requests = [{field: getattr(result, field) for field in RESULT_FIELDS} for result in results]
    body = {"requests": requests, "stats": dict(stats)}
    return json.dumps(body, default=lambda array: array.tolist())


def _note(*lines: str) -> None:
    for line in lines:
        click.echo(line, err=True)
