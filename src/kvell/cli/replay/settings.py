"""The settings of ``kvell replay``, from which its options are derived."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvell.cli.replay.instances import Together
from kvell.cli.replay.models import ModelFlags
from kvell.cli.replay.trace_file import TraceFlags
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.flags import setting, setting_of
from kvell.memory import Eviction
from kvell.pages.sizing import Manager


@dataclass(frozen=True)
class ReplaySettings:
    """The settings of a replay."""

    source: TraceFlags = field(default_factory=TraceFlags)
    chosen: ModelFlags = field(default_factory=ModelFlags)
    kv_memory_bytes: int | None = setting_of(EngineSettings, "kv_memory_bytes")
    cpu_buffer_bytes: int | None = setting_of(EngineSettings, "cpu_buffer_bytes")
    manager: Manager = setting_of(EngineSettings, "manager")
    arrivals: Literal["start", "trace"] = setting(
        "start",
        "--arrivals",
        "All requests arrive at the start, or each at its time in the trace.",
        choices=("start", "trace"),
    )
    hardware: str = setting(
        "a100-80",
        "--hardware",
        "How long a step takes: a profile's name, a TOML file, or what `calibrate` wrote.",
    )
    any_machine: bool = setting(
        False, "--any-machine", "Accept a calibration of another machine or version.", "mark"
    )
    slo_ttft: float | None = setting(
        None, "--slo-ttft", "Time limit to the first token.", "seconds"
    )
    slo_tpot: float | None = setting(None, "--slo-tpot", "Time limit per further token.", "seconds")
    max_num_batched_tokens: int = setting(
        8192,
        "--max-num-batched-tokens",
        "Maximum tokens of one step; a server's default is 2048.",
        "integer",
        metavar="",
    )
    max_num_seqs: int = setting(
        256,
        "--max-num-seqs",
        "Maximum number of requests that run together.",
        "integer",
        metavar="",
    )
    enable_chunked_prefill: bool = setting_of(EngineSettings, "enable_chunked_prefill")
    common_pool: bool = setting_of(EngineSettings, "common_pool")
    eviction: Eviction = setting_of(EngineSettings, "eviction")
    together: Together = field(default_factory=Together)
    ignore_sessions: bool = setting(
        False, "--ignore-sessions", "Do not delay a turn until the previous answer ends.", "mark"
    )
    requests_out: Path | None = setting(
        None, "--requests-out", "Write a JSON line per request.", "file"
    )
    timeline_path: Path | None = setting(
        None,
        "--timeline",
        "Write a JSON line per sampled step, for `kvell plot`; gzipped if it ends in .gz.",
        "file",
    )
