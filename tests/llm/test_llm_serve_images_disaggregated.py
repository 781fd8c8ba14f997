"""``kvell serve --instances prefill=1,decode=1`` with a model of images: they move along."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.llm.test_llm_serve_disaggregated import Server
from tests.llm.test_llm_serve_images import answer, data_url, messages, picture, save_processor
from tests.models.pictures import CROSS, picture_module

PATIENCE_SECONDS = 120.0
SHADES = ((10,), (200,), (10, 200), (77,))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama 3.2 Vision: what its text attends to must be where it goes on."""
    found = tmp_path_factory.mktemp("pictures") / "pictures"
    module = picture_module(CROSS)
    module.save_pretrained(found)
    save_processor(found, module.config)
    return found


def served(path: Path, *options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--model", f"pictures={path}"]
    command += ["--port", "0", "--json", "--kv-memory", "8MiB", "--dtype", "float32"]
    command += ["--max-model-len", "256", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield Server(json.loads(process.stdout.readline())["url"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0


@pytest.fixture(scope="module")
def alone(path: Path) -> Iterator[Server]:
    yield from served(path)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Server]:
    yield from served(path, "--instances", "prefill=1,decode=1")


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
