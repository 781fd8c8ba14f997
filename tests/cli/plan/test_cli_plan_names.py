"""Names of configs: listed, and offered where one is near; no hub is tried then."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvell.cli.plan import configs
from kvell.cli.terminal import files
from kvell.cli.terminal.files import config_names, near_config
from tests.cli.conftest import Kvell

CONFIGS = Path(__file__).parents[3] / "bench" / "configs"
PLANS = """
import sys
from kvell.cli.main import main
sys.argv = ["kvell", "plan", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_all_names_are_listed(kvell: Kvell) -> None:
    ended = kvell("plan", "--models")
    assert ended.code == 0
    names = ended.stdout.split()
    assert names == sorted({*config_names(), "smollm2"})
    assert {"llama3-8b", "jamba-mini", "large/llama3-70b"} <= set(names)
    for name in config_names():
        assert (CONFIGS / f"{name}.json").is_file()


def test_an_installed_wheel_has_the_names_of_the_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CMake installs ``bench/configs`` as ``kvell/configs`` (scripts/packages checks a wheel)."""
    names = config_names()
    shutil.copytree(CONFIGS, tmp_path / "kvell" / "configs")
    monkeypatch.setattr(files, "FOLDERS", (tmp_path / "none", tmp_path / "kvell" / "configs"))
    assert config_names() == names
    assert files.named_config("llama3-8b") == str(tmp_path / "kvell/configs/llama3-8b.json")


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("jamba", "jamba-mini"),
        ("Jamba-Mini", "jamba-mini"),
        ("gpt-oss-120b", "gpt-oss-20b"),
        ("llama3-70b", "large/llama3-70b"),
        ("large/llama3-7b", "large/llama3-70b"),
        ("qwen3-next-80b", "qwen3-next"),
        ("llama-3.2-11b", "llama-3.2-11b-vision"),
    ],
)
@pytest.mark.parametrize("command", [("plan",), ("replay", "--trace", "chat", "--limit", "1")])
def test_a_near_name_is_offered_and_no_hub_is_tried(
    kvell: Kvell,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    near: str,
    command: tuple[str, ...],
) -> None:
    def fail(_model: str) -> Path:
        raise AssertionError("the hub was tried")

    monkeypatch.setattr(configs, "fetch_config", fail)
    ended = kvell(*command, "--model", given, "--kv-memory", "1GiB")
    assert ended.code == 2
    assert f"did you mean {near}? kvell plan --models" in ended.stderr


@pytest.mark.parametrize("given", ["gpt2", "someone/jamba", "meta-llama/llama3-8b", "bloom-560m"])
def test_names_of_the_hub_are_not_near(given: str) -> None:
    assert near_config(given) == ""


@pytest.mark.parametrize(
    "name", ["llama3-8b", "gpt-oss-20b", "jamba-mini", "qwen3-next", "deepseek-v2-lite"]
)
def test_a_plan_imports_neither_torch_nor_transformers(name: str) -> None:
    code = [sys.executable, "-c", PLANS, str(CONFIGS / f"{name}.json"), "--json"]
    ended = subprocess.run(code, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"
