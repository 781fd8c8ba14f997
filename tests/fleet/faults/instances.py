"""What the instances of a cluster of fault tests are, and what is asked of them."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fleet.faults.load import FAKE_REQUESTS, Draw

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fake_instance.py"))
FAKE_WORDS = (
    *("--door", "{host}", "--incarnation", "{incarnation}", "--instance-id", "{instance_id}"),
    *("--step-seconds", "0.001", "--credits", "16"),
)


@dataclass(frozen=True)
class Instances:
    """Instances that are alike; by default fakes.

    :param counts: of each role.
    :param program: what the nodes run, and ``words``: its arguments, with what is filled in.
    :param streams: requests of a front at once.
    :param draw: what fronts of the test's process ask.
    :param links: descriptors for each other instance that one may open once it has work.
    :param jobs: files of what fronts in other processes ask; without, endless fake requests.
    :param refusals: parts of the reasons why a request that was let in may get no answer.
    :param barred: parts of the reasons why one may not be let in.
    :param startup_seconds: the time in which one must be ready.
    :param silence_seconds: after which one that says nothing is killed.
    """

    counts: Mapping[str, int]
    program: tuple[str, ...] = FAKE
    words: tuple[str, ...] = FAKE_WORDS
    streams: int = 4
    draw: Draw = FAKE_REQUESTS
    links: int = 0
    jobs: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ("its instance ended",)
    barred: tuple[str, ...] = ("no instance serves",)
    startup_seconds: float = 20.0
    silence_seconds: float = 1.5


FAKES = Instances({"mixed": 3})
