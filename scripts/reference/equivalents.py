"""``python -m scripts.reference.equivalents``: writes ``docs/equivalents.md``."""

from collections.abc import Iterator
from pathlib import Path

from kvell.equivalents.table import EQUIVALENTS, OTHER_COMMANDS, REFUSED_VALUES, VALUES, Equivalent

PAGE = Path(__file__).parents[2] / "docs" / "equivalents.md"
HEAD = """# Flags and scripts of vLLM and SGLang, flags of llama.cpp, and commands of Ollama

Made from the code by `python -m scripts.reference.equivalents`. Flags that Kvell has under the
same name are not listed: see `kvell serve --help-all`. The same names work as keys of
`--config FILE`, and as arguments of `LLM(…)` and `AsyncEngine(…)` where these have the setting.

Counts such as `--max-model-len` may be written `8k` (8000) or `8K` (8192). Fields of a JSON object
may be flags of their own: `--speculative-config.method ngram`. [Scripts](#scripts) have a table.

- **honoured**: translated to the flags of Kvell that the table names;
- **accepted**: without effect, with one line on stderr, because Kvell does it anyway;
- **refused**: an error with the same sentence, before anything is loaded.
"""

SCRIPTS = """## Scripts

vLLM's offline scripts run with `kvell` in place of `vllm`: `kvell`, `kvell.sampling_params`,
`kvell.inputs`, `kvell.outputs`, `kvell.engine.arg_utils`, `kvell.v1.engine.async_llm`,
`kvell.v1.engine.llm_engine`, `kvell.v1.metrics.reader`, `kvell.utils` and `kvell.lora.request`
have vLLM's names. An argument that Kvell does not have is refused by name, with a remedy, unless
its value asks for what Kvell does anyway.

| script | what differs |
|---|---|
"""
DIFFERENCES: tuple[tuple[str, str], ...] = (
    (
        "`LLM.generate`, `LLM.chat`",
        "no progress bar unless `use_tqdm=True`; all arguments of `EngineArgs` are flags of "
        "`kvell serve`, or in the table above",
    ),
    (
        "parameters of a script's command line (`EngineArgs.add_cli_args`, "
        "`FlexibleArgumentParser`)",
        "the model is `smollm2` unless the script sets another",
    ),
    (
        "`LLM.embed`, `LLM.encode`",
        "the vector of the last token, of length one; no vectors of tokens, no other `dimensions`",
    ),
    (
        "`LLM.score`",
        "the cosine of two vectors: no cross-encoders",
    ),
    (
        "`LLM.classify`",
        "refused: no model with a classification head is served",
    ),
    (
        "structured outputs",
        "grammars in Lark's syntax, or in EBNF with `root ::= …`; no structural tags",
    ),
    (
        "streaming with `AsyncLLM`, `AsyncLLMEngine`",
        "the class is `AsyncEngine`; `from_engine_args` makes an engine that starts with its "
        "first request; one answer a request (`n=1`)",
    ),
    (
        "prefix caching",
        "`enable_prefix_caching=False` computes each prompt whole",
    ),
    (
        "speculative decoding",
        "methods `ngram` and `draft_model`; figures from `get_metrics()` are named `kvell:…`",
    ),
    (
        "`LLM.beam_search`",
        "`text` and `tokens` of a beam are those of the answer, without the prompt",
    ),
    (
        "`LLMEngine`",
        "steps run on a thread of their own; `step()` waits for the next outputs",
    ),
    (
        "log probabilities",
        "at most 20 likely tokens at a position; `output.logprobs` (not "
        "`output.outputs[0].logprobs`) is Kvell's own form",
    ),
    (
        "prompts as `TokensPrompt`, `TextPrompt`",
        "images are tensors of the model's processor, in `images`",
    ),
    (
        "LoRA",
        "refused: merge the adapter into the model",
    ),
)
"""Scripts, and how Kvell's outputs or arguments differ."""

COMMANDS_HEAD = """These are refused with the same sentence. Ollama's names of models are refused as
well: `qwen3:0.6b` is `Qwen/Qwen3-0.6B` on the hub, and `hf.co/OWNER/NAME` is `OWNER/NAME`.
"""


def page() -> str:
    """Return the text of the page."""
    flags = "\n".join(f"| {' | '.join(_cells(entry))} |" for entry in EQUIVALENTS)
    scripts = "\n".join(f"| {script} | {text} |" for script, text in DIFFERENCES)
    commands = "\n".join(
        f"| `{name}` | {other.system} | {_sentence(f'{other.problem}; {other.remedy}')} |"
        for name, other in OTHER_COMMANDS.items()
    )
    values = "\n".join(f"| `{flag}` | {given} | {words} |" for flag, given, words in _value_rows())
    return (
        f"{HEAD}\n| flag | of | | in Kvell |\n|---|---|---|---|\n{flags}\n\n"
        f"## Values\n\n| flag | value | in Kvell |\n|---|---|---|\n{values}\n\n"
        f"## Commands\n\n{COMMANDS_HEAD}\n"
        f"| command | of | in Kvell |\n|---|---|---|\n{commands}\n\n{SCRIPTS}{scripts}\n"
    )


def _cells(entry: Equivalent) -> tuple[str, ...]:
    sentence = _sentence(entry.sentence)
    return _codes(entry.names), entry.system, _treatment(entry), sentence


def _treatment(entry: Equivalent) -> str:
    if entry.accepts:
        return f"{_codes(sorted(entry.accepts))} accepted, else refused"
    return entry.action


def _value_rows() -> Iterator[tuple[str, str, str]]:
    for flag, values in VALUES.items():
        for name, own in values.items():
            yield flag, f"`{name}`", f"`{own}`"
    for flag, refusals in REFUSED_VALUES.items():
        for sentence in dict.fromkeys(refusals.values()):
            given = [value for value, why in refusals.items() if why == sentence]
            yield flag, _codes(given), f"refused: {_sentence(sentence)}"


def _codes(names: "tuple[str, ...] | list[str]") -> str:
    return ", ".join(f"`{name}`" for name in names)


def _sentence(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
