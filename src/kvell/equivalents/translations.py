"""Translations of other systems' flags into flags of Kvell."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvell.equivalents.entry import Words, refusal
from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode_json


def instances(value: str) -> Words:
    """Translate a number of copies."""
    if not value.isdecimal() or not int(value):
        sentence = "is not a whole number above 0; write it like 2"
        raise refusal("--data-parallel-size", value, sentence)
    return () if int(value) == 1 else (("--instances", f"mixed={int(value)}"),)


def gibibytes(flag: str) -> Callable[[str], Words]:
    """Return a translation of GiB of host memory to ``--cpu-buffer``."""

    def translate(value: str) -> Words:
        try:
            size = float(value)
        except ValueError:
            raise refusal(flag, value, "is not a number of GiB; write it like 8") from None
        return (("--cpu-buffer", f"{value}GiB"),) if size else ()

    return translate


def chunk(value: str) -> Words:
    """Translate the tokens of a chunk of a prompt; -1 is whole prompts."""
    if value == "-1":
        return (("--no-enable-chunked-prefill", None),)
    return (("--max-num-batched-tokens", value),)


def context(value: str) -> Words:
    """Translate the tokens of a context; 0 is the model's own."""
    return () if value == "0" else (("--max-model-len", value),)


DRAFT_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "model": "--speculative-model",
        "num_speculative_tokens": "--num-speculative-tokens",
        "prompt_lookup_max": "--prompt-lookup-max",
        "prompt_lookup_min": "--prompt-lookup-min",
    }
)
"""Fields of vLLM's ``speculative_config``, and their flags."""
DRAFT_METHODS = ("ngram", "draft_model")


def draft_words(value: str | Mapping[str, object]) -> Words:
    """Translate vLLM's ``speculative_config``, a mapping or a JSON object, into flags.

    :raises ChangeSomething: naming the field that Kvell cannot honour.
    """
    flag = "--speculative-config"
    example = '{"method": "ngram", "num_speculative_tokens": 4}'
    fields = _json_fields(flag, value, example)
    method = fields.pop("method", "draft_model" if "model" in fields else "ngram")
    if method not in DRAFT_METHODS:
        remedy = f"use one of {', '.join(DRAFT_METHODS)}"
        raise ChangeSomething(f"{flag} method", method, "is not served", remedy)
    if unknown := sorted(fields.keys() - DRAFT_FIELDS.keys()):
        remedy = f"use {', '.join(DRAFT_FIELDS)}"
        raise ChangeSomething(f"{flag} {unknown[0]}", fields[unknown[0]], "is not served", remedy)
    if method == "ngram" and "model" in fields:
        del fields["model"]  # vLLM writes "[ngram]" there
    return tuple((DRAFT_FIELDS[name], str(text)) for name, text in fields.items())


GRAMMAR_BACKENDS = ("auto", "xgrammar", "guidance")


def structured_words(value: str | Mapping[str, object]) -> Words:
    """Translate vLLM's ``structured_outputs_config``, or the name of a backend, into flags.

    :raises ChangeSomething: naming the field that Kvell cannot honour.
    """
    flag = "--structured-outputs-config"
    given = {"backend": value} if isinstance(value, str) and value.isidentifier() else value
    fields = _json_fields(flag, given, '{"backend": "auto"}')
    words = list[tuple[str, str | None]]()
    for name, choice in fields.items():
        if name == "reasoning_parser":
            words += [("--reasoning-parser", str(choice))] if choice else []
        elif name == "backend":
            if choice not in GRAMMAR_BACKENDS:
                problem = "is not served: one compiler of grammars serves all"
                remedy = f"use one of {', '.join(GRAMMAR_BACKENDS)}"
                raise ChangeSomething(f"{flag} backend", choice, problem, remedy)
        elif name == "enable_in_reasoning":
            if choice is not False:
                problem = "is not served: reasoning is free"
                raise ChangeSomething(f"{flag} {name}", choice, problem, "leave it out")
        elif name not in WITHOUT_EFFECT:
            remedy = "use backend, reasoning_parser"
            raise ChangeSomething(f"{flag} {name}", choice, "is not served", remedy)
    return tuple(words)


WITHOUT_EFFECT = frozenset(
    ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
)
"""Fields of ``structured_outputs_config`` that ask for what Kvell does anyway."""


def at_most(flag: str, bound: int) -> Callable[[str], Words]:
    """Return a translation of a limit that Kvell has anyway, if it is not above ``bound``."""

    def translate(value: str) -> Words:
        if not value.isdecimal() or int(value) > bound:
            raise refusal(flag, value, f"the limit is {bound}; use at most {bound}")
        return ()

    return translate


def _json_fields(flag: str, value: object, example: str) -> dict[str, object]:
    """Return the fields of a mapping or a JSON object.

    :raises ChangeSomething: if the value is neither.
    """
    try:
        fields = decode_json(value) if isinstance(value, str) else value
    except MalformedError:
        fields = None
    if not isinstance(fields, Mapping):
        raise ChangeSomething(flag, value, "is not a JSON object", f"write it like '{example}'")
    return dict(fields)
