"""Pictures at a real server: bounded together before any is decoded, and apart from texts."""

import io
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from kvell.vocabulary import KIB, MIB
from tests.llm import pictures
from tests.llm.servers import PATIENCE_SECONDS, Served

pytestmark = pytest.mark.xdist_group("picture_server")
PICTURES = 4


@pytest.fixture
def front(picture_server: Served) -> tuple[str, int]:
    return picture_server.url, picture_server.pid


@pytest.fixture
def url(picture_server: Served) -> str:
    return picture_server.url


@cache
def blank(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return pictures.data_url(file.getvalue())


def largest_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(one.split()[1]) * KIB for one in lines if one.startswith("VmHWM"))


def refused(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    [line] = [one for one in lines if "rejections_total{" in one and '"image_pixels"' in one]
    return float(line.split()[-1])


def begin(front: tuple[str, int]) -> int:
    """Load the processor, and look for the most memory from here on; return that of now."""
    assert pictures.answer(front[0], pictures.messages(blank(32, 32))).status_code == 200
    Path(f"/proc/{front[1]}/clear_refs").write_text("5")
    return largest_bytes(front[1])


def test_pictures_are_bounded_together_before_one_is_decoded(front: tuple[str, int]) -> None:
    """Each is within its own bound; together they would be 4 GiB."""
    before_bytes, told = begin(front), refused(front[0])
    reply = pictures.answer(front[0], pictures.messages(*[blank(8192, 4096)] * 32))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages")
    assert "1073741824 pixels in 32 images: are too many; send at most 33554432" in error["message"]
    assert largest_bytes(front[1]) - before_bytes < 64 * MIB
    assert refused(front[0]) == told + 1


@pytest.mark.parametrize(
    "size", [(8193, 4096), pytest.param((20_000, 20_000), marks=pytest.mark.long)]
)
def test_a_picture_beyond_the_bound_counts(url: str, size: tuple[int, int]) -> None:
    told = refused(url)
    assert pictures.answer(url, pictures.messages(blank(*size))).status_code == 400
    assert refused(url) == told + 1


def test_too_many_pictures_count(url: str) -> None:
    told = refused(url)
    assert pictures.answer(url, pictures.messages(*[blank(1, 1)] * 33)).status_code == 400
    assert refused(url) == told + 1


def test_a_truncated_picture_is_refused_by_name(url: str) -> None:
    file = pictures.picture(9, side=300)[:-200]
    reply = pictures.answer(url, pictures.messages(pictures.data_url(file)))
    assert reply.status_code == 400
    assert "image 0" in reply.json()["error"]["message"]


def test_a_text_is_answered_while_pictures_are_decoded(front: tuple[str, int]) -> None:
    """Decoding is one request at a time, so its height in memory is one request's."""
    url, pid = front
    before_bytes, content = begin(front), pictures.messages(blank(8192, 4096))

    def ask(content: Any) -> int:
        return int(pictures.answer(url, content, max_tokens=1).status_code)

    with ThreadPoolExecutor(PICTURES) as threads:
        large = {threads.submit(ask, content) for _ in range(PICTURES)}
        first, waiting = wait(large, PATIENCE_SECONDS, FIRST_COMPLETED)
        assert ask([{"role": "user", "content": "ab"}]) == 200
        undecoded = sum(not one.done() for one in waiting)
    assert {one.result() for one in first | waiting} == {200}
    assert undecoded >= 1, "the text waited for all pictures"
    parts = httpx.get(f"{url}/debug/memory").json()["parts"]
    assert largest_bytes(pid) - before_bytes < 700 * MIB < parts["front_work_bytes"]
