"""Arguments of vLLM's classes and methods that Kvell's do not have; ``arguments.json`` has them."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from kvell.equivalents.other import Other
from kvell.wire.decoding import decode_packaged

MERGE_ADAPTER = "merge the adapter into the model, and serve that"

_TABLES = decode_packaged(dict[str, dict[str, Other]], "kvell.equivalents", "arguments.json")
_PROCESSORS = replace(_TABLES["SamplingParams"]["logits_processors"], values=([], ()))

SAMPLING_OTHERS: Mapping[str, Other] = MappingProxyType(
    _TABLES["SamplingParams"] | {"logits_processors": _PROCESSORS}
)
"""Arguments of ``SamplingParams``."""
STRUCTURED_OTHERS: Mapping[str, Other] = MappingProxyType(_TABLES["StructuredOutputs"])
"""Arguments of ``StructuredOutputs``."""
BEAM_OTHERS: Mapping[str, Other] = MappingProxyType(_TABLES["BeamSearchParams"])
"""Arguments of ``BeamSearchParams``."""
POOLING_OTHERS: Mapping[str, Other] = MappingProxyType(_TABLES["PoolingParams"])
"""Arguments of ``PoolingParams``."""
CALL_OTHERS: Mapping[str, Other] = MappingProxyType(_TABLES["calls"])
"""Arguments of the methods of ``LLM``, ``LLMEngine`` and ``AsyncEngine``."""
ENGINE_OTHERS: Mapping[str, Other] = MappingProxyType(_TABLES["from_engine_args"])
"""Arguments of ``from_engine_args``."""
