"""Everything that says what an engine serves, as command-line flags give it."""

from dataclasses import dataclass

from kvell.memory import Manager


@dataclass(frozen=True)
class EngineSettings:
    """The flags for what to serve and with how much memory; None means Kvell decides.

    Fields mean what arguments of the same name of :class:`kvell.LLM` mean.

    :ivar memory_parts: instances that start at once; each may have this part of what is free.
        No flag of users, so :meth:`flags` has it not.
    """

    model: str
    kv_memory_bytes: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    kv_budget: str | None = None
    device: str = "cpu"
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    manager: Manager = "kvell"
    num_speculative_tokens: int = 0
    speculative_model: str | None = None
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    beside: tuple[str, ...] = ()
    memory_bytes: int | None = None
    cpu_buffer_bytes: int | None = None
    async_scheduling: bool = False
    slo_ttft_seconds: float | None = None
    slo_tpot_seconds: float | None = None
    memory_parts: int = 1
    enable_chunked_prefill: bool = True

    def flags(self) -> list[str]:
        """Return the command-line flags that give these settings again."""
        written = {
            "--memory": self.memory_bytes,
            "--kv-memory": self.kv_memory_bytes,
            "--cpu-buffer": self.cpu_buffer_bytes,
            "--slo-ttft": self.slo_ttft_seconds,
            "--slo-tpot": self.slo_tpot_seconds,
            "--dtype": self.dtype,
            "--kv-cache-dtype": self.kv_cache_dtype,
            "--quantization": self.quantization,
            "--kv-budget": self.kv_budget,
            "--device": self.device,
            "--max-model-len": self.max_model_len,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--max-num-seqs": self.max_num_seqs,
            "--manager": self.manager,
            "--num-speculative-tokens": self.num_speculative_tokens,
            "--speculative-model": self.speculative_model,
            "--prompt-lookup-max": self.prompt_lookup_max,
            "--prompt-lookup-min": self.prompt_lookup_min,
        }
        switches = ["--async-scheduling" if self.async_scheduling else "--no-async-scheduling"]
        if not self.enable_chunked_prefill:
            switches.append("--no-enable-chunked-prefill")
        models = [("--model", model) for model in (self.model, *self.beside)]
        pairs = [(flag, str(value)) for flag, value in written.items() if value is not None]
        return [*(word for pair in (*models, *pairs) for word in pair), *switches]
