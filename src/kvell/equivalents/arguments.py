"""Arguments of vLLM's classes and methods that Kvell's do not have."""

from collections.abc import Mapping
from types import MappingProxyType

from kvell.equivalents.other import Other

MERGE_ADAPTER = "merge the adapter into the model, and serve that"
_CUT_PROMPT = "give the prompt's last token ids as prompt_token_ids"

SAMPLING_OTHERS: Mapping[str, Other] = MappingProxyType(
    {
        "detokenize": Other(why="answers always have their text"),
        "spaces_between_special_tokens": Other(
            why="special tokens are in the text as the model wrote them"
        ),
        "flat_logprobs": Other(values=(False,), remedy="leave it out: a position is a mapping"),
        "skip_clone": Other(why="parameters are copied when a request begins"),
        "skip_reading_prefix_cache": Other(
            values=(False,), remedy="use prompt_logprobs=0, or LLM(enable_prefix_caching=False)"
        ),
        "truncate_prompt_tokens": Other(remedy=_CUT_PROMPT),
        "logits_processors": Other(
            values=([], ()), remedy="use logit_bias, bad_words, allowed_token_ids or a grammar"
        ),
        "extra_args": Other(values=({},)),
        "best_of": Other(values=(1,), remedy="use n, and choose by cumulative_logprob"),
        "use_beam_search": Other(values=(False,), remedy="use LLM.beam_search"),
        "length_penalty": Other(values=(1.0, 1), remedy="use LLM.beam_search"),
        "early_stopping": Other(values=(False,), remedy="use LLM.beam_search"),
        "repetition_detection": Other(remedy="use repetition_penalty"),
        "thinking_token_budget": Other(values=(-1,), remedy="use the HTTP server's chat"),
        "logprob_token_ids": Other(values=([],), remedy="use logprobs"),
    }
)
"""Arguments of ``SamplingParams``."""

STRUCTURED_OTHERS: Mapping[str, Other] = MappingProxyType(
    {
        "disable_fallback": Other(why="there is only one backend"),
        "disable_any_whitespace": Other(why='JSON is always written with ", " and ": "'),
        "disable_additional_properties": Other(
            why="an object that names properties has no others unless its schema allows them"
        ),
        "whitespace_pattern": Other(remedy="write a grammar with the whitespace"),
        "structural_tag": Other(remedy="write a grammar with the tags, or use tools"),
        "backend": Other(why="there is only one backend"),
        "_backend": Other(why="there is only one backend"),
        "_backend_was_auto": Other(why="there is only one backend"),
    }
)
"""Arguments of ``StructuredOutputs``."""

BEAM_OTHERS: Mapping[str, Other] = MappingProxyType(
    {
        "include_stop_str_in_output": Other(
            values=(False,), remedy="leave it out: token_ids include the token that ended a beam"
        ),
    }
)
"""Arguments of ``BeamSearchParams``."""

POOLING_OTHERS: Mapping[str, Other] = MappingProxyType(
    {
        "dimensions": Other(remedy="cut the vectors, and scale them to length one again"),
        "normalize": Other(values=(True,), remedy="leave it out: vectors have length one"),
        "use_activation": Other(values=(True,), remedy="leave it out: vectors have length one"),
        "truncate_prompt_tokens": Other(remedy=_CUT_PROMPT),
        "pooling_type": Other(values=("LAST",), remedy="leave it out: it is the last token's"),
        "softmax": Other(values=(True, False)),
        "activation": Other(values=(True,), remedy="leave it out: vectors have length one"),
        "skip_reading_prefix_cache": Other(
            values=(False,), remedy="use LLM(enable_prefix_caching=False)"
        ),
        "extra_kwargs": Other(values=({},)),
        "output_kind": Other(why="a vector is returned once, whole"),
    }
)
"""Arguments of ``PoolingParams``."""

CALL_OTHERS: Mapping[str, Other] = MappingProxyType(
    {
        "lora_request": Other(values=([],), remedy=MERGE_ADAPTER),
        "prompt_adapter_request": Other(remedy=MERGE_ADAPTER),
        "tokenization_kwargs": Other(values=({},), remedy="give prompts as token ids"),
        "mm_processor_kwargs": Other(values=({},), remedy="leave it out: images are read one way"),
        "concurrency_limit": Other(why="all prompts run together, as far as memory allows"),
        "prompt_token_ids": Other(remedy='give prompts like {"prompt_token_ids": […]}'),
        "guided_options_request": Other(remedy="use SamplingParams(structured_outputs=…)"),
        "reasoning_ended": Other(values=(False,)),
        "tools_strict": Other(values=(False,)),
        "truncate_prompt_tokens": Other(remedy=_CUT_PROMPT),
        "trace_headers": Other(why="only the HTTP server writes traces"),
        "data_parallel_rank": Other(remedy="leave it out: the router chooses an instance"),
        "prompt_text": Other(why="prompts have their text"),
        "arrival_time": Other(why="requests arrive when they are made"),
        "chat_template_content_format": Other(values=("auto",)),
    }
)
"""Arguments of the methods of ``LLM``, ``LLMEngine`` and ``AsyncEngine``."""

ENGINE_OTHERS: Mapping[str, Other] = MappingProxyType(
    {
        "usage_context": Other(why="Kvell reports no usage"),
        "start_engine_loop": Other(values=(True,), remedy="leave it out: the loop always runs"),
        "stat_loggers": Other(remedy="call stats() or get_metrics()"),
        "enable_multiprocessing": Other(why="an engine runs in this process, on its own thread"),
        "enable_log_requests": Other(why="only the HTTP server logs requests"),
        "disable_log_stats": Other(why="statistics are returned, not logged"),
        "disable_log_requests": Other(why="only the HTTP server logs requests"),
        "client_addresses": Other(),
        "client_count": Other(values=(1,)),
        "client_index": Other(values=(0,)),
    }
)
"""Arguments of ``from_engine_args``."""
