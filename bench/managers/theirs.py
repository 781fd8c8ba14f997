"""vLLM's manager in a process of its own environment: jobs go in, figures come back."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bench.managers.environment import PYTHON, require
from bench.managers.peer.job import Kind, PeerJob, PeerLayer
from bench.replay.shapes import SHAPES, Shape
from bench.result_file import REPOSITORY
from kvell.memory import GroupKind, LayerSpec

PEER_SHAPES = SHAPES
"""Shapes that vLLM plans as it would its own models: those of the peers' table."""
CHECKPOINTS_IN_CHUNKS = frozenset({"nemotron_h"})
"""Model types whose backend in vLLM writes checkpoints of states inside a chunk (Mamba 2)."""
KINDS: dict[GroupKind, Kind] = {
    GroupKind.FULL: "full",
    GroupKind.SLIDING: "sliding",
    GroupKind.CHUNKED: "chunked",
    GroupKind.STATE: "state",
}


class PeerFailedError(RuntimeError):
    """The process ended in the middle of a job; the message is its last line of stderr."""


def peer_job(shape: Shape, trace: Path, limit: int, memory_bytes: int, **more: Any) -> PeerJob:
    """A job for vLLM; ``more`` are further fields of :class:`PeerJob`."""
    layers = tuple(_layer(layer) for layer in shape.description.layers)
    in_chunks = shape.config.model_type in CHECKPOINTS_IN_CHUNKS
    path = str(trace.resolve())
    return PeerJob(shape.name, layers, in_chunks, path, limit, memory_bytes, **more)


def _layer(layer: LayerSpec) -> PeerLayer:
    return PeerLayer(
        KINDS[layer.kind], layer.kv_heads, layer.head_size, layer.window_tokens, layer.state_bytes
    )


class Peer:
    """One process for many jobs: it takes seconds to start.

    :param environment: directory that ``bench.managers.environment`` made.
    :raises ChangeSomething: if it is no such environment.
    """

    def __init__(self, environment: Path) -> None:
        self._python = require(environment) / PYTHON
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def run(self, job: PeerJob, progress: Callable[[float], None] = lambda _: None) -> Any:
        """The figures of one job, or ``{"refused": reason}``.

        :raises PeerFailedError: if the process ends.
        """
        process = self._started()
        given, answers = _pipes(process)
        given.write(job.line())
        given.flush()
        for line in answers:
            answer = json.loads(line)
            if "finished" not in answer:
                return answer
            progress(answer["finished"])
        _, errors = process.communicate()
        self._process = None
        raise PeerFailedError(ended(errors))

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None:
            command = [str(self._python), "-m", "bench.managers.peer"]
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        return self._process


def ended(errors: str) -> str:
    """Why a process ended, from its stderr."""
    last = errors.strip().splitlines()[-1:] or ["it said nothing"]
    return f"vLLM's process ended: {last[0]}"


def _pipes(process: "subprocess.Popen[str]") -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process was started without pipes")
    return process.stdin, process.stdout
