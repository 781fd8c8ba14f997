"""A calibration holds for one machine, one code, one model."""

from pathlib import Path

from kvell.calibration.prints import code_digest, machine_print, model_print, software_print
from kvell.models.config.configs import config_from_dict
from kvell.models.config.description import describe

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}
DESCRIPTION = describe(config_from_dict(LLAMA), 2)


def test_this_machine() -> None:
    found = machine_print("cpu")
    assert found == machine_print("cpu")
    assert found.cores >= 1
    assert found.processor


def test_this_code() -> None:
    found = software_print()
    assert found.torch.startswith("2.")
    assert len(found.code) == 16


def test_a_changed_kernel_is_another_code(tmp_path: Path) -> None:
    room = tmp_path / "attention"
    room.mkdir()
    (room / "kernel.py").write_text("fast = False")
    before = code_digest(tmp_path)
    (tmp_path / "README.md").write_text("not run")
    assert code_digest(tmp_path) == before
    (room / "kernel.py").write_text("fast = True")
    assert code_digest(tmp_path) != before


def test_models_are_told_apart_by_their_sizes() -> None:
    first = model_print("a", "bfloat16", DESCRIPTION, 1000)
    assert model_print("b", "auto", DESCRIPTION, 1000).digest == first.digest
    others = [
        model_print("a", "float32", DESCRIPTION, 1000),
        model_print("a", "bfloat16", DESCRIPTION, 1001),
        model_print("a", "bfloat16", describe(config_from_dict(LLAMA), 4), 1000),
    ]
    assert first.digest not in [other.digest for other in others]
