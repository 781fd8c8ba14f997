"""A few layers of the packaged model: its words and real weights, a third of the time of a step.

Tests that compare Kvell with transformers, or an answer with another one, need no more of it.
"""

import json
import re
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from kvell.models.sources.converted import MARKER
from kvell.models.sources.packaged import MODEL_NAME

LAYERS = (0, 10, 20, 29)
"""What they say makes no sense, but depends on all of the prompt and hardly repeats itself."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")


def write_shallow(packaged: Path, cache_dir: Path) -> Path:
    """Write it as the packaged model of a cache, so that it is served under the same name.

    :param packaged: directory of the whole model.
    """
    path = cache_dir / MODEL_NAME
    path.mkdir(parents=True)
    for name in ("generation_config.json", "chat_template.jinja", MARKER):
        shutil.copy(packaged / name, path)
    for file in packaged.glob("tokenizer*"):
        shutil.copy(file, path)
    config = json.loads((packaged / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(LAYERS)}))
    with safe_open(packaged / "model.safetensors", "pt") as whole:
        tensors = {name: whole.get_tensor(name) for name in filter(_is_kept, whole.keys())}
    renamed = {_renamed(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _is_kept(tensor: str) -> bool:
    found = LAYER.match(tensor)
    return found is None or int(found[1]) in LAYERS


def _renamed(tensor: str) -> str:
    return LAYER.sub(lambda found: f"model.layers.{LAYERS.index(int(found[1]))}.", tensor)
