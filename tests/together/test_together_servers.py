"""``kvell serve`` with every mechanism, as a person would run it: the answers of a plain server."""

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, starmap
from pathlib import Path

import httpx
import pytest

from tests.async_engine.lending_jobs import WORDS, draft_model
from tests.llm.servers import serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000), pytest.mark.xdist_group("together")]
GREEDY = Path(__file__).parents[1] / "data" / "smollm2_greedy.jsonl"
SMOLLM2 = "smollm2"
BUFFER, PLAIN_MEMORY = "256MiB", "2GiB"
AT_ONCE = 10
PATIENCE_SECONDS = 1200.0
LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Load:
    """What a server is asked, which depends on its memory.

    :param memory: ``--memory`` of an instance; 538 MiB of it are weights.
    :param conversations: of two turns.  First turns fill the pool and a part of the CPU buffer, so
        that the first of them are only in the buffer when the second turns come.
    :param turn_tokens: of a first turn.
    :param long_tokens: of a request that an instance cannot hold; 0: there is none.
    :param crowd: requests of which an instance holds two, but not with their whole answers, while
        another has room for a part of one.
    """

    memory: str
    conversations: int
    turn_tokens: int
    long_tokens: int = 0
    crowd: int = 0


SMALL_MEMORY = Load("760MiB", 9, 700, 6500)
"""An instance holds 5,000 tokens."""
LARGE_MEMORY = Load("1200MiB", 20, 700, crowd=3)
"""An instance holds 15,000 tokens, more than SmolLM2's context: only a crowd needs loans."""
CROWD_TOKENS = 4000
CROWD_ANSWER = 4100
"""Two fit when the second comes, though the first has grown, and not when both have grown.  Answers
take far longer than prompts, so that a second request comes while the first one is answered."""


@dataclass(frozen=True)
class Question:
    """A prompt, and the number of tokens of the answer."""

    prompt: list[int]
    count: int
    model: str = SMOLLM2


@dataclass
class Server:
    """A server, and the largest value that each of its metrics ever had, by instance.

    :ivar most: by metric, label besides the instance, and instance.
    """

    url: str
    most: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def ask(self, question: Question) -> list[int]:
        body = {
            "model": question.model,
            "prompt": question.prompt,
            "max_tokens": question.count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS)
        assert reply.status_code == httpx.codes.OK, reply.text
        tokens: list[int] = reply.json()["choices"][0]["token_ids"]
        return tokens

    def ask_all(self, questions: Sequence[Question], at_once: int = AT_ONCE) -> list[list[int]]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.ask, questions))

    def look(self) -> None:
        page = httpx.get(f"{self.url}/metrics", timeout=60).text
        for name, labels, value in re.findall(r"^kvell:(\w+)\{(.*)\} (\S+)$", page, re.MULTILINE):
            words = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            instance = words.pop("instance", "")
            words.pop("model_name", None)
            key = name, ",".join(words.values()), instance
            self.most[key] = max(self.most[key], float(value))  # type: ignore[assignment]

    def seen(self, name: str, label: str = "", role: str = "") -> float:
        keys = [(name, label, instance) for *_, instance in self.most if instance.startswith(role)]
        return sum(self.most[key] for key in set(keys))


@contextmanager
def watched(cache_dir: Path, *flags: str) -> Iterator[Server]:
    """Start a server whose metrics are read all the time."""
    is_over = threading.Event()
    with serving(cache_dir, "--dtype", "float32", *flags) as served:
        server = Server(served.url)

        def watch() -> None:
            while not is_over.wait(LOOK_SECONDS):
                server.look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield server
            server.look()
            assert httpx.get(f"{server.url}/debug/audit", timeout=60).json()["clean"]
        finally:
            is_over.set()
            thread.join()


def words(number: int, count: int) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(3, WORDS) for _ in range(count)]


def next_turn(question: Question, answer: list[int]) -> Question:
    prompt = [*question.prompt, *answer, *words(99, 20)]
    return Question(prompt, 24, question.model)


def answers(server: Server, load: Load, models: Sequence[str] = (SMOLLM2,)) -> list[list[int]]:
    """Return the answers to short prompts, two turns of long conversations, and a long request."""
    rows = [json.loads(row)["prompt_token_ids"] for row in GREEDY.read_text().splitlines()]
    named = cycle(models)
    short = [Question(prompt, 64, next(named)) for prompt in rows]
    turns = [
        Question(words(i, load.turn_tokens), 24, next(named)) for i in range(load.conversations)
    ]
    said = server.ask_all(short)
    firsts = server.ask_all(turns, 2)
    # The latest first: what was evicted last is still in the buffer, however small that is.
    seconds = list(starmap(next_turn, zip(turns, firsts, strict=True)))[::-1]
    said += firsts + server.ask_all(seconds, 2)
    if load.long_tokens:
        said.append(server.ask(Question(words(100, load.long_tokens), 40)))
    crowd = [Question(words(200 + i, CROWD_TOKENS), CROWD_ANSWER) for i in range(load.crowd)]
    return said + (server.ask_all(crowd, load.crowd) if crowd else [])


def signs(server: Server) -> dict[str, float]:
    """Return what the metrics say that mechanisms did; steps of decode instances are moves."""
    return {
        "moves": server.seen("steps_total", role="decode"),
        "deflations": server.seen("ladder_rungs_total", "deflate"),
        "buffer hits": server.seen("ladder_rungs_total", "cache_in"),
        "draft tokens": server.seen("spec_decode_num_draft_tokens_total"),
        "sections lent": server.seen("kv_sections", "lent"),
        "sections borrowed": server.seen("kv_sections", "borrowed"),
    }


@pytest.fixture(scope="module")
def draft(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draft_model(smollm2_path, tmp_path_factory.mktemp("draft") / "draft")


@pytest.mark.parametrize("load", [SMALL_MEMORY, LARGE_MEMORY], ids=lambda load: load.memory)
def test_every_mechanism_acts_and_no_answer_changes(
    smollm2_path: Path, draft: Path, load: Load
) -> None:
    flags = ["--memory", load.memory, "--cpu-buffer", BUFFER, "--speculative-model", str(draft)]
    # Prices of a machine that others use differ from run to run, and so do loans.
    flags += ["--no-calibration", "--instances", "prefill=1,decode=2"]
    with watched(smollm2_path.parent, *flags) as server:
        said = answers(server, load)
    acted = signs(server)
    print(load, acted)  # noqa: T201
    with watched(smollm2_path.parent, "--kv-memory", PLAIN_MEMORY) as plain:
        expected = answers(plain, load)
    wrong = [i for i, tokens in enumerate(said) if tokens != expected[i]]
    assert (wrong, len(said)) == ([], len(expected))
    assert [sign for sign, count in acted.items() if not count] == []


def test_two_models_at_three_instances_with_every_mechanism(
    smollm2_path: Path, draft: Path
) -> None:
    """The second model is the draft model's, by a name of its own."""
    models = (SMOLLM2, "small")
    chosen = ["--model", SMOLLM2, "--model", f"small={draft}"]
    flags = [*chosen, "--memory", "740MiB", "--cpu-buffer", BUFFER, "--instances", "mixed=3"]
    load = Load("740MiB", 64, 700, 6500)
    with watched(smollm2_path.parent, *flags, "--no-calibration") as server:
        said = answers(server, load, models)
    acted = signs(server)
    print(load, acted)  # noqa: T201
    with watched(smollm2_path.parent, *chosen, "--kv-memory", PLAIN_MEMORY) as plain:
        expected = answers(plain, load, models)
    wrong = [i for i, tokens in enumerate(said) if tokens != expected[i]]
    assert (wrong, len(said)) == ([], len(expected))
    assert acted["deflations"] and acted["buffer hits"] and acted["sections lent"]
