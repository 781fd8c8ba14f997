"""Check that one model may draft tokens for another: ids must mean the same to both."""

from pathlib import Path

from kvell.errors import ChangeSomething
from kvell.models.config.description import describe
from kvell.models.families.plain_config import known_config
from kvell.models.text.tokenizer import Tokenizer, holds_tokenizer

FLAG = "--speculative-model"
REMEDY = "use a smaller model of the same family"


def check_draft(
    path: Path, model: Path, tokenizer: Tokenizer, name: str, overrides: str | None = None
) -> None:
    """Compare two models' vocabularies, from their files alone; no weights are read.

    If either model has no tokenizer, only the vocabularies' sizes are compared.

    :raises ChangeSomething: if the vocabularies differ in size or in a token.
    """
    configs = known_config(model, overrides), known_config(path)
    own, drafts = (describe(config, 2).vocab_size for config in configs)
    check_vocabularies(own, drafts, name)
    if not (holds_tokenizer(path) and tokenizer.knows_text):
        return
    if Tokenizer.load(path).backend.get_vocab() != tokenizer.backend.get_vocab():
        problem = "has a tokenizer that gives tokens other ids than the model's"
        raise ChangeSomething(FLAG, name, problem, REMEDY)


def check_vocabularies(own: int, drafts: int, name: str) -> None:
    """Refuse a draft model whose vocabulary differs in size from the model's.

    :raises ChangeSomething: if the sizes differ.
    """
    if own != drafts:
        problem = f"has a vocabulary of {drafts} tokens, the model one of {own}"
        raise ChangeSomething(FLAG, name, problem, REMEDY)
