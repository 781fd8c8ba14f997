"""Fields that other servers support and Kvell does not: accepted values, and reasons.

Every field of OpenAI's and vLLM's request bodies is either in a schema of this package or in one of
these tables; ``docs/request-fields.md`` is generated from both.
"""

from collections.abc import Mapping
from types import MappingProxyType

from kvell.equivalents.other import Other


def _table(*tables: Mapping[str, Other], **fields: Other) -> Mapping[str, Other]:
    merged: dict[str, Other] = {}
    for table in tables:
        merged.update(table)
    return MappingProxyType(merged | fields)


_OWN_IDS = Other(why="answers have ids of their own")
_UNUSED = Other(why="accepted and not used")
_STORED = Other(why="nothing is stored")
_NO_STATE = "send the whole conversation"
_SERVER = "the server moves pages between instances by itself"

_EVERYWHERE = _table(
    request_id=_OWN_IDS,
    client_metadata=_STORED,
    prompt_cache_options=Other(why="prefixes are cached without being asked"),
    guided_decoding_backend=Other(why="there is only one backend"),
    stream_interval=Other(why="pieces are sent as soon as they are ready"),
    mm_processor_kwargs=Other(values=({},), remedy="leave it out: images are read one way"),
    media_io_kwargs=Other(values=({},), remedy="leave it out: images are read one way"),
    kv_transfer_params=Other(values=({},), remedy=f"leave it out: {_SERVER}"),
    ec_transfer_params=Other(values=({},), remedy=f"leave it out: {_SERVER}"),
    vllm_xargs=Other(values=({},)),
    repetition_detection=Other(remedy="use repetition_penalty"),
    watermarking=Other(values=(False,)),
    moderation=Other(remedy="leave it out: nothing is moderated"),
)

_GENERATION = _table(
    _EVERYWHERE,
    user=_UNUSED,
    metadata=_UNUSED,
    store=_STORED,
    service_tier=_UNUSED,
    safety_identifier=_UNUSED,
    prompt_cache_retention=_UNUSED,
    spaces_between_special_tokens=Other(
        why="special tokens are in the text as the model wrote them"
    ),
    truncation_side=Other(values=("left",), remedy='use "left"'),
    logits_processors=Other(values=([],), remedy="use logit_bias"),
    guided_whitespace_pattern=Other(remedy="use structured_outputs.grammar"),
    structural_tag=Other(remedy="use structured_outputs.grammar"),
    logprob_token_ids=Other(remedy="use logprobs or top_logprobs"),
    return_tokens_as_token_ids=Other(values=(False,), remedy="use return_token_ids"),
    routed_experts_prompt_start=Other(why="answers do not report experts"),
    return_token_offsets=Other(why="only /render of vLLM answers with them"),
    return_mm_kwargs=Other(why="only /render of vLLM answers with them"),
    return_prompt_text=Other(values=(False,), remedy="use /tokenize with messages"),
)

CHAT_OTHERS = _table(
    _GENERATION,
    verbosity=Other(why="the model decides how verbose an answer is"),
    prediction=Other(why="it makes OpenAI's models faster, and changes no answer"),
    prompt=Other(remedy="use messages, or /v1/completions"),
    max_output_tokens=Other(remedy="use max_completion_tokens"),
    functions=Other(values=([],), remedy="use tools"),
    function_call=Other(values=("none", "auto"), remedy="use tool_choice"),
    audio=Other(remedy="leave it out: only text is made"),
    modalities=Other(values=(["text"],), remedy="leave it out: only text is made"),
    web_search_options=Other(remedy="leave it out: nothing is searched"),
    chat_template=Other(remedy="start the server with --chat-template"),
    echo=Other(values=(False,), remedy="leave it out: an answer is a message of its own"),
)
"""Unsupported fields of ``/v1/chat/completions``."""

CHAT_MESSAGE_OTHERS = _table(audio=Other(remedy="leave it out: no sound is stored"))
"""Unsupported fields of the messages of ``/v1/chat/completions``."""

COMPLETION_OTHERS = _table(
    _GENERATION,
    messages=Other(remedy="use prompt, or /v1/chat/completions"),
    max_completion_tokens=Other(remedy="use max_tokens"),
    thinking_token_budget=Other(values=(-1,), remedy="use /v1/chat/completions"),
    tools=Other(values=([],), remedy="use /v1/chat/completions"),
    prompt_embeds=Other(values=([],), remedy="send a text or token ids as prompt"),
)
"""Unsupported fields of ``/v1/completions``."""

RESPONSES_OTHERS = _table(
    _EVERYWHERE,
    store=_STORED,
    service_tier=_UNUSED,
    prompt_cache_retention=_UNUSED,
    background=Other(values=(False,), remedy="wait for the answer, or set stream to true"),
    previous_response_id=Other(remedy="send the whole conversation as input"),
    conversation=Other(remedy="send the whole conversation as input"),
    prompt=Other(remedy="send the prompt's text as instructions and input"),
    access_programs=Other(values=([],)),
    context_management=Other(values=([],), remedy=_NO_STATE),
    enable_response_messages=Other(values=(False,), remedy="leave it out: read output"),
    image=Other(remedy="send images as parts of the input"),
    previous_input_messages=Other(values=([],), remedy=_NO_STATE),
    previous_response=Other(remedy=_NO_STATE),
    messages=Other(remedy="use input"),
    max_tokens=Other(remedy="use max_output_tokens"),
    max_completion_tokens=Other(remedy="use max_output_tokens"),
    n=Other(values=(1,), remedy="use 1: a response has one answer"),
    response_format=Other(remedy="use text.format"),
    reasoning_effort=Other(remedy="use reasoning.effort"),
    logprobs=Other(values=(False,), remedy="use include and top_logprobs"),
)
"""Unsupported fields of ``/v1/responses``."""

SCORE_OTHERS = _table(
    _EVERYWHERE,
    user=_UNUSED,
    use_activation=Other(why="similarities are scores as they are"),
    stream=Other(values=(False,), remedy="leave it out: the answer is sent whole"),
    truncate_prompt_tokens=Other(remedy="send shorter texts"),
    max_tokens_per_doc=Other(remedy="send shorter texts"),
)
"""Unsupported fields of ``/score`` and ``/rerank``."""

MESSAGES_OTHERS = _table(
    request_id=_OWN_IDS,
    metadata=_UNUSED,
    service_tier=Other(values=("auto", "standard_only"), remedy='use "auto"'),
    inference_geo=_UNUSED,
    diagnostics=_UNUSED,
    speed=_UNUSED,
    user_profile_id=_UNUSED,
    context_management=Other(why="the conversation is read as it was sent"),
    mcp_servers=Other(values=([],), remedy="run their tools yourself"),
    container=Other(remedy="leave it out, and run code yourself"),
    max_completion_tokens=Other(remedy="use max_tokens"),
    stop=Other(remedy="use stop_sequences"),
    n=Other(values=(1,), remedy="use 1: a message has one answer"),
    response_format=Other(remedy="use output_config.format"),
    reasoning_effort=Other(remedy="use output_config.effort"),
    instructions=Other(remedy="use system"),
)
"""Unsupported fields of ``/v1/messages``."""

EMBEDDING_OTHERS = _table(
    _EVERYWHERE,
    user=_UNUSED,
    messages=Other(remedy="send texts as input"),
    add_special_tokens=Other(values=(True,), remedy="send token ids"),
    additional_data=Other(why="nothing reads it"),
    truncate_prompt_tokens=Other(remedy="send shorter inputs"),
    truncation_side=Other(why="no input is cut"),
    stream=Other(values=(False,), remedy="leave it out: the answer is sent whole"),
    pooling=Other(values=("last",), remedy="leave it out: it is that of the last token"),
    normalize=Other(values=(True,), remedy="leave it out: vectors have length one"),
    use_activation=Other(values=(True,), remedy="leave it out: vectors have length one"),
    embed_dtype=Other(values=("float32",), remedy='use "float32"'),
    endianness=Other(values=("native", "little"), remedy='use "little"'),
)
"""Unsupported fields of ``/v1/embeddings``."""

_OLLAMA = _table(
    keep_alive=Other(why="models stay loaded"),
    truncate=Other(why="a prompt that is too long is refused"),
    shift=Other(why="no context is shifted: an answer ends where the context does"),
)

SHOW_OTHERS = _table(
    verbose=Other(why="tokens and tensors are not listed"),
    options=_UNUSED,
    system=_UNUSED,
    template=_UNUSED,
)
"""Unsupported fields of ``/api/show``."""

PULL_OTHERS = _table(
    insecure=Other(why="nothing is fetched"),
    username=Other(why="nothing is fetched"),
    password=Other(why="nothing is fetched"),
)
"""Unsupported fields of ``/api/pull``."""

OLLAMA_EMBEDDING_OTHERS = _table(keep_alive=Other(why="models stay loaded"))
"""Unsupported fields of ``/api/embed`` and ``/api/embeddings``."""

GENERATE_OTHERS = _table(
    _OLLAMA,
    template=Other(values=("",), remedy="use raw, or start the server with --chat-template"),
    context=Other(values=([],), remedy="send the conversation to /api/chat"),
    messages=Other(remedy="use prompt, or /api/chat"),
)
"""Unsupported fields of ``/api/generate``."""

OLLAMA_CHAT_OTHERS = _table(
    _OLLAMA,
    prompt=Other(remedy="use messages, or /api/generate"),
    system=Other(values=("",), remedy="use a message of the role system"),
    raw=Other(values=(False,), remedy="use /api/generate"),
    template=Other(values=("",), remedy="start the server with --chat-template"),
)
"""Unsupported fields of ``/api/chat``."""

OPTION_OTHERS = _table(
    mirostat=Other(values=(0,), remedy="use top_p or min_p"),
    mirostat_tau=Other(why="it has an effect with mirostat only"),
    mirostat_eta=Other(why="it has an effect with mirostat only"),
    tfs_z=Other(values=(1, 1.0), remedy="use top_p or min_p"),
    typical_p=Other(values=(1, 1.0), remedy="use top_p or min_p"),
    penalize_newline=Other(values=(True,), remedy="leave it out"),
    num_keep=Other(why="no context is shifted"),
    **dict.fromkeys(
        tuple(
            (
                "num_batch num_gpu main_gpu num_thread numa low_vram f16_kv use_mmap use_mlock "
                "vocab_only logits_all embedding_only"
            ).split()
        ),
        Other(why="the server's own options decide"),
    ),
)
"""Unsupported fields of ``options`` in Ollama's requests."""
