"""Adapters, by the names of vLLM's module: none is served."""

from kvell.equivalents.arguments import MERGE_ADAPTER
from kvell.errors import ChangeSomething


class LoRARequest:
    """An adapter of vLLM, which Kvell refuses.

    :raises ChangeSomething: always.
    """

    def __init__(self, lora_name: str, *_arguments: object, **_given: object) -> None:
        raise ChangeSomething("LoRARequest", lora_name, "Kvell serves no adapters", MERGE_ADAPTER)
