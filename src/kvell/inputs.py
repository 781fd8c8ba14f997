"""Prompts as mappings, by the names of vLLM's module."""

from collections.abc import Mapping, Sequence
from typing import Required, TypedDict


class TextPrompt(TypedDict, total=False):
    """A prompt as a text; the further fields are those of :data:`kvell.llm.Prompt`."""

    prompt: Required[str]
    images: Mapping[str, object]
    model: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; ``prompt`` is its text, for outputs."""

    prompt_token_ids: Required[Sequence[int]]
    prompt: str
    images: Mapping[str, object]
    model: str
