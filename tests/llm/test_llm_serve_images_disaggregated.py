"""``kvell serve --instances prefill=1,decode=1`` with a model of images: they move along."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.llm.disaggregated import Server
from tests.llm.pictures import answer, data_url, messages, picture
from tests.llm.servers import PATIENCE_SECONDS, Served, serving

pytestmark = [pytest.mark.xdist_group("picture_server"), pytest.mark.long]
"""`tests/models/serving/test_models_images_handed_over.py` has it in one process."""
SHADES = ((10,), (200,), (10, 200), (77,))


@pytest.fixture(scope="module")
def alone(picture_server: Served) -> Server:
    return Server(picture_server.url)


@pytest.fixture(scope="module")
def server(smollm2_path: Path, picture_path: Path) -> Iterator[Server]:
    flags = ["--model", f"pictures={picture_path}", "--kv-memory", "8MiB", "--dtype", "float32"]
    flags += ["--max-model-len", "256", "--instances", "prefill=1,decode=1"]
    with serving(smollm2_path.parent, *flags) as served:
        yield Server(served.url)


def asked(server: Server, shades: tuple[int, ...], **fields: Any) -> list[int]:
    content = messages(*(data_url(picture(shade)) for shade in shades))
    reply = answer(server.url, content, **fields).json()
    found: list[int] = reply["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_answers_about_images_are_those_of_one_instance(
    alone: Server, server: Server, fields: dict[str, Any]
) -> None:
    """Together, and once more: the prompt is then cached where it was computed."""
    expected = [asked(alone, shades, **fields) for shades in SHADES]
    assert len({tuple(one) for one in expected}) > 1, "the images must matter"
    before = server.counted("steps_total", "decode-0")
    with ThreadPoolExecutor(len(SHADES)) as pool:
        found = list(pool.map(lambda shades: asked(server, shades, **fields), SHADES))
    assert found == expected
    assert [asked(server, shades, **fields) for shades in SHADES] == expected
    assert server.counted("steps_total", "decode-0") >= before + 7, "all but the first tokens"
    assert server.counted("prompt_tokens_by_source_total", "decode-0") == 0
    assert server.is_clean()


def test_a_death_loses_no_request(alone: Server, server: Server) -> None:
    """The images are sent once more, from the front's own log."""
    expected = [asked(alone, shades, max_tokens=64) for shades in SHADES]
    pid = server.instances()["decode-0"]["pid"]
    with ThreadPoolExecutor(len(SHADES)) as pool:
        answers = [pool.submit(asked, server, shades, max_tokens=64) for shades in SHADES]
        os.kill(pid, signal.SIGKILL)
        assert [one.result(PATIENCE_SECONDS) for one in answers] == expected
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
