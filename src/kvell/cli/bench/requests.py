"""The requests of ``kvell bench serve``: ids, words or messages, and extra fields."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvell.cli.terminal.session import Session
from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode_json

PromptFormat = Literal["auto", "ids", "text"]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Flags:
    """The flags that determine how requests are sent."""

    base_url: str
    model: str
    endpoint: Literal["completions", "chat"]
    rate: float | None
    time_scale: float
    think_time: float | None
    disconnect_share: float
    prompt_format: PromptFormat
    vocab_size: int
    tokenizer: str | None
    return_token_ids: bool
    ignore_eos: bool
    extra_body: str | None
    api_key: str | None
    timeout: float
    slo_ttft: float | None
    slo_tpot: float | None


def made_prompts(
    session: Session, flags: Flags, rows: Sequence[Any], seed: int, progress: Any
) -> Any:
    """Return prompts in the form that the flags and the rows require."""
    from kvell.load.prompts import chat_prompts, id_prompts, text_prompts

    if flags.endpoint == "chat":
        return chat_prompts(rows, seed)
    knows_ids = flags.return_token_ids or flags.tokenizer is not None
    goes_on = any(row.continues for row in rows)
    if flags.prompt_format == "text" or (
        flags.prompt_format == "auto" and goes_on and not knows_ids
    ):
        return text_prompts(rows, seed)
    if goes_on and not knows_ids:
        problem = "needs the ids of answers, which next turns begin with"
        remedy = "add --tokenizer or --return-token-ids, or use text"
        raise ChangeSomething("--prompt-format", "ids", problem, remedy)
    return id_prompts(rows, seed, flags.vocab_size, _encoder(session, flags, progress))


def _encoder(session: Session, flags: Flags, progress: Any) -> Encode:
    """Return a function from an answer's text to ids, without special tokens."""
    if flags.tokenizer is None:
        return lambda _text: []
    from kvell.models.sources.source import resolve_model
    from kvell.models.text.tokenizer import Tokenizer

    path = resolve_model(flags.tokenizer, session.cache_dir, progress)
    backend = Tokenizer.load(path).backend
    return lambda text: list(backend(text, add_special_tokens=False)["input_ids"])


def extra_fields(flags: Flags) -> dict[str, Any]:
    """Return the extra fields that the flags add to every request.

    :raises ChangeSomething: if ``--extra-body`` is not a JSON object.
    """
    try:
        fields = decode_json(flags.extra_body or "{}")
    except MalformedError:
        fields = None
    if not isinstance(fields, dict):
        remedy = """write it like '{"top_k": 1}'"""
        raise ChangeSomething("--extra-body", flags.extra_body, "is not a JSON object", remedy)
    return fields | ({"return_token_ids": True} if flags.return_token_ids else {})
