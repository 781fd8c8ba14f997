"""Settings that cannot work are found before weights are loaded."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvell.byte_sizes import typed_bytes
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.engine.unloaded import check_named
from kvell.errors import ChangeSomething
from kvell.vocabulary import GIB, KIB, MIB
from tests.models.harness import tiny_config

FREE_BYTES = 2 * GIB
PLAIN = EngineSettings("tiny", kv_memory_bytes=64 * MIB)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_config("LlamaForCausalLM").save_pretrained(path)
    return path


def check(settings: EngineSettings, directory: Path, draft: bool = False) -> None:
    check_named(settings, [("tiny", directory)], directory if draft else None, FREE_BYTES)


def test_settings_that_work_pass(directory: Path) -> None:
    check(PLAIN, directory)
    check(replace(PLAIN, num_speculative_tokens=4), directory, draft=True)
    check(EngineSettings("tiny", memory_bytes=GIB, cpu_buffer_bytes=GIB), directory)
    check_named(PLAIN, [("a", directory), ("b", directory)], None, FREE_BYTES)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"kv_memory_bytes": 4 * GIB}, "--kv-memory", "4GiB"),
        ({"kv_memory_bytes": 10**12}, "--kv-memory", "1TB"),
        ({"memory_bytes": 3 * GIB}, "--memory", "3GiB"),
        ({"cpu_buffer_bytes": 2 * GIB}, "--cpu-buffer", "2GiB"),
        ({"kv_memory_bytes": 64}, "--kv-memory", "64B"),
        ({"kv_memory_bytes": 4 * KIB, "max_model_len": 128}, "--kv-memory", "4KiB"),
        ({"max_model_len": 10**6}, "--max-model-len", 10**6),
    ],
)
def test_settings_that_cannot_work_are_named_as_typed(
    directory: Path, changes: dict[str, Any], field: str, value: object
) -> None:
    with pytest.raises(ChangeSomething) as caught:
        check(replace(PLAIN, **changes), directory)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert "use" in caught.value.remedy


def test_the_remedy_leaves_room_for_weights_and_activations(
    directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with (tmp_path / "model.safetensors").open("wb") as file:
        entry = {"dtype": "U8", "shape": [GIB], "data_offsets": [0, GIB]}
        header = json.dumps({"w": entry}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + GIB)
    with pytest.raises(ChangeSomething) as caught:
        check(replace(PLAIN, kv_memory_bytes=4 * GIB), tmp_path)
    most_mib = int(caught.value.remedy.removesuffix("MiB").split()[-1])
    assert 512 < most_mib < 1024


def test_a_gpu_is_not_compared_with_the_hosts_memory(directory: Path) -> None:
    check(replace(PLAIN, device="cuda", kv_memory_bytes=100 * GIB), directory)


def test_a_draft_model_alone_means_four_tokens() -> None:
    assert EngineSettings("m", speculative_model="d").num_speculative_tokens == 4
    given = replace(PLAIN, speculative_model="d", num_speculative_tokens=2)
    assert given.num_speculative_tokens == 2
    assert EngineSettings("m").num_speculative_tokens == 0


def test_the_checks_import_no_torch() -> None:
    script = (
        "import sys, kvell.engine.unloaded, kvell.models.families.plain_config; "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (10**12, "1TB"),
        (256 * MIB, "256MiB"),
        (3 * GIB // 2, "1.5GiB"),
        (24 * 10**9, "24GB"),
        (123456789, "123456789B"),
        (0, "0B"),
    ],
)
def test_sizes_are_shown_as_they_are_typed(size_bytes: int, text: str) -> None:
    assert typed_bytes(size_bytes) == text
