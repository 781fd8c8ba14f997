"""Requests with their right answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvell.engine.protocol.sampling_params import SamplingParams


@dataclass(frozen=True)
class Job:
    """A prompt, how it is sampled, and the tokens of an undisturbed answer."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int]


def write_jobs(path: Path, jobs: Sequence[Job]) -> None:
    path.write_bytes(msgspec.json.encode(jobs))


def read_jobs(path: Path) -> list[Job]:
    return msgspec.json.decode(path.read_bytes(), type=list[Job])
