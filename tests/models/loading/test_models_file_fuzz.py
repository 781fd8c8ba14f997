"""Model directories spoiled at random: one line of error or the right answer, in bounds."""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.attention.portable import PortableKernels
from kvell.engine.sampling.model_defaults import sampling_defaults
from kvell.errors import ChangeSomething, KvellError
from kvell.models.config.activations import activation_model
from kvell.models.config.description import describe
from kvell.models.config.embeddings import embedding_facts
from kvell.models.families.plain_config import known_config, sizes_config
from kvell.models.families.weight_sizes import weights_bytes
from kvell.models.loading.loading import check_model, load_paged_model
from kvell.models.loading.random_weights import write_random_model
from kvell.models.loading.weight_files import (
    INDEX_FILE,
    SINGLE_FILE,
    read_weight_map,
)
from kvell.models.text.chat_template import chosen_template, read_template
from kvell.models.text.end_tokens import eos_token_ids
from kvell.models.text.tokenizer import Tokenizer
from kvell.pages.sizing import plan_layout
from tests.depth import scaled
from tests.hostile_files import bounded, spoil, spoil_bytes
from tests.models.harness import tiny_config

pytestmark = pytest.mark.long
CONFIGS = sorted(Path("bench/configs").glob("*.json"))
TEMPLATES = Path("tests/data/ordinary_chat_templates.txt").read_text().splitlines()
HEADER: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    "b": {"dtype": "F16", "shape": [2, 2], "data_offsets": [16, 24]},
    "__metadata__": {"format": "pt"},
}
INDEX: dict[str, Any] = {"metadata": {"total_size": 24}, "weight_map": {"a": SINGLE_FILE}}
PIECES = (
    *("{{ ", " }}", "{% for x in range(9999) %}", "{% endfor %}", "| tojson"),
    *(" * 99999999", " ~ "),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """A tiny model with the packaged model's tokenizer."""
    config = tiny_config("LlamaForCausalLM")
    path = write_random_model(tmp_path_factory.mktemp("model") / "llama", config, seed=5)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(smollm2_path / name, path)
    return path


def refused_or_done(read: Callable[[], object], what: object, file_bytes: int = 0) -> None:
    """Run a reader in bounds, and require that errors are one line for the user."""
    try:
        with bounded(file_bytes):
            read()
    except KvellError as error:
        assert isinstance(error, ChangeSomething), what
        assert "\n" not in str(error), what
        assert len(str(error)) < 2000, what


@pytest.mark.parametrize("seed", range(scaled(20)))
def test_weight_files(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        raw = json.dumps(spoil(HEADER, rng, rng.choice((0, 1, 1, 2)))).encode()
        length = rng.choice((len(raw), len(raw), len(raw), len(raw) - 1, 2**40))
        data = struct.pack("<Q", length) + raw + bytes(rng.choice((24, 24, 0, 23, 1000)))
        data = spoil_bytes(data, rng) if rng.random() < 0.3 else data
        (tmp_path / SINGLE_FILE).write_bytes(data)
        index = json.dumps(spoil(INDEX, rng, rng.choice((0, 1, 2)))).encode()
        index = spoil_bytes(index, rng) if rng.random() < 0.3 else index
        (tmp_path / INDEX_FILE).write_bytes(index)
        what = (data[:300], index[:300])
        size = len(data) + len(index)
        refused_or_done(lambda: read_weight_map(tmp_path).map_tensors(), what, size)


def plan(file: Path) -> None:
    config = sizes_config(file)
    description = describe(config, 2)
    activation_model(config)
    weights_bytes(config, 2)
    plan_layout(description.layers, 1 << 30)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configs(tmp_path: Path, config: Path) -> None:
    raw = json.loads(config.read_text())
    rng = random.Random(config.stem)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plan(tmp_path)  # imports and allocates what every config needs
    for _ in range(scaled(60)):
        spoiled = spoil(raw, rng, rng.choice((1, 1, 2, 3)))
        (tmp_path / "config.json").write_text(json.dumps(spoiled))
        for read in (plan, check_model):
            refused_or_done(lambda read=read: read(tmp_path), spoiled)  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(scaled(5)))
def test_loaded_models(saved: Path, tmp_path: Path, seed: int) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "model"))
    raw = json.loads((path / "config.json").read_text())
    load_paged_model(path, PortableKernels())
    rng = random.Random(seed)
    for _ in range(30):
        spoiled = spoil(raw, rng, rng.choice((1, 2)))
        (path / "config.json").write_text(json.dumps(spoiled))

        def load() -> None:
            load_paged_model(path, PortableKernels())
            embedding_facts(path, known_config(path))

        refused_or_done(load, spoiled)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_tokenizers(saved: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "model"))
    raw = json.loads((path / name).read_text())
    Tokenizer.load(path)
    rng = random.Random(name)
    for _ in range(scaled(30)):
        spoiled = json.dumps(spoil(raw, rng, rng.choice((1, 2)))).encode()
        (path / name).write_bytes(spoil_bytes(spoiled, rng) if rng.random() < 0.2 else spoiled)

        def load() -> None:
            sampling_defaults(path)
            eos_token_ids(path)
            tokenizer = Tokenizer.load(path)
            if tokenizer.has_chat_template:
                tokenizer.encode_chat([{"role": "user", "content": "Hi"}])

        refused_or_done(load, spoiled, len(spoiled))


@pytest.mark.parametrize("seed", range(scaled(10)))
def test_templates(seed: int) -> None:
    rng = random.Random(seed)
    messages = [{"role": "user", "content": "Hi " * 100}] * 3
    for _ in range(60):
        first, second = rng.sample(TEMPLATES, 2)
        text = first[: rng.randrange(len(first))] + rng.choice(PIECES) * rng.choice((0, 1, 1, 5))
        text += second[rng.randrange(len(second)) :]

        def render(text: str = text) -> None:
            template = read_template(None, chosen_template(text + "\n"), None, {})
            assert template is not None
            try:
                template.render(messages, None, {}, opens_answer=True)
            except ChangeSomething:
                raise
            except Exception as error:  # the tokenizer reports any error of a template
                assert not isinstance(error, MemoryError), text

        refused_or_done(render, text)
