"""Forms of kernels: a build may lack some; a processor runs the best of those that are there."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvell.attention.choice import warn_of_absent_form

ROOT = Path(__file__).parent.parent
SETS = ("amx", "avx512", "avx512f", "avx2", "portable")
COMPILER = shutil.which("c++")
CMAKE = Path(sys.executable).with_name("cmake")
DISPATCH = {
    "attention": ("Backend", "{set}_backend()", "backend_at(i)"),
    "forward": ("Kernels", "{set}_forward(Element)", "kernels_at(i, Element::float32)"),
    "linear": ("LinearBackend", "{set}_linear()", "linear_backend_at(i)"),
}
"""The type of a module's forms, the function that returns one, and the call that chooses."""
MAIN = """
#include <cstdio>

#include "{module}/dispatch.cpp"

namespace kvell {{
{forms}
}}

int main() {{
  using namespace kvell;
  for (const char* name : processor_sets()) std::printf("%s ", name);
  std::puts("");
  for (int i = 0; const {type}* form = {chosen}; ++i) std::printf("%s ", form->name);
}}
"""


def chosen_forms(folder: Path, module: str, built: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return this processor's sets, and those that a module with some forms runs; best first."""
    kind, function, chosen = DISPATCH[module]
    forms = "\n".join(
        f"const {kind}* {function.format(set=name)} {{ static {kind} form; "
        f'form.name = "{name}"; return &form; }}'
        for name in SETS
        if module != "linear" or name in ("avx512", "avx2", "portable")
    )
    source = folder / "main.cpp"
    source.write_text(MAIN.format(module=module, forms=forms, type=kind, chosen=chosen))
    has = [f"-DKVELL_HAS_{name.upper()}=1" for name in built]
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / module}"]
    program = folder / "main"
    command = [str(COMPILER), "-std=c++17", "-w", *includes, *has, str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    sets, _, run = printed.partition("\n")
    return sets.split(), run.split()


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("built", [("avx2",), ("avx512",)], ids="+".join)
@pytest.mark.parametrize("module", DISPATCH)
def test_a_processor_runs_the_forms_that_both_it_and_the_build_have(
    tmp_path: Path, module: str, built: tuple[str, ...]
) -> None:
    sets, run = chosen_forms(tmp_path, module, built)
    assert sets[-1] == "portable"
    assert run == [name for name in sets if name in (*built, "portable")]


@pytest.mark.long
@pytest.mark.skipif(not CMAKE.exists(), reason="needs cmake in this environment")
@pytest.mark.parametrize("asked", ["native", "avx512", "all"])
def test_a_build_compiles_the_forms_that_are_asked_for(tmp_path: Path, asked: str) -> None:
    sets, _ = chosen_forms(tmp_path, "attention", ())
    command = [
        *(str(CMAKE), "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja"),
        *(f"-DCMAKE_MAKE_PROGRAM={CMAKE.with_name('ninja')}", f"-DKVELL_SETS={asked}"),
        *(f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    files = [
        Path(unit["file"]) for unit in json.loads((tmp_path / "compile_commands.json").read_text())
    ]
    units = {path.relative_to(ROOT / "csrc").as_posix() for path in files if ROOT in path.parents}
    forms = {path for path in units if "/backend_" in path}
    every = {
        path.relative_to(ROOT / "csrc").as_posix() for path in ROOT.glob("csrc/*/backend_*.cpp")
    }
    assert forms >= {f"{module}/backend_portable.cpp" for module in DISPATCH}
    if asked == "all":
        assert forms == every
    else:
        best = sets[0] if asked == "native" else asked
        assert f"attention/backend_{best}.cpp" in forms
        assert len(forms) < len(every)


@pytest.mark.parametrize(
    ("processor", "built", "named"),
    [
        (["avx2", "portable"], ["portable"], "runs avx2, for which this build has none: portable"),
        (["amx", "avx512", "portable"], ["avx512", "portable"], "runs amx"),
        (["avx2", "portable"], ["avx2", "portable"], ""),
        (["avx512", "avx512f", "avx2", "portable"], ["avx512", "portable"], ""),
        (["portable"], ["portable"], ""),
    ],
)
def test_a_form_that_a_build_lacks_is_logged(
    caplog: pytest.LogCaptureFixture, processor: list[str], built: list[str], named: str
) -> None:
    warn_of_absent_form(processor, built)
    assert named in caplog.text
    assert bool(caplog.text) == bool(named)
    assert ("make dev" in caplog.text) == bool(named)
