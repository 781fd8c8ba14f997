"""Types of the compiled module (csrc/attention/module.cpp)."""

LayerArgs = tuple[int, int, int, int, int, int, int, int, int]
BatchArgs = tuple[int, int, int, int, int, int, int, int]
RecordsArgs = tuple[int, int]

def instruction_sets() -> list[str]: ...
def processor_sets() -> list[str]: ...
def write_kv(
    layer: LayerArgs,
    tokens: int,
    page_ids: int,
    offsets: int,
    key: int,
    key_token_stride: int,
    key_head_stride: int,
    value: int,
    value_token_stride: int,
    value_head_stride: int,
) -> None: ...
def attend(
    instruction_set: str,
    layer: LayerArgs,
    batch: BatchArgs,
    query: int,
    query_element: int,
    token_stride: int,
    head_stride: int,
    heads: int,
    scale: float,
    window_tokens: int,
    chunk_tokens: int,
    softcap: float,
    sinks: int,
    output: int,
    output_element: int,
    maximum: int,
    denominator: int,
    elsewhere: RecordsArgs,
    partials: RecordsArgs,
    num_threads: int,
) -> None: ...
