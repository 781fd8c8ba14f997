"""Named devices and links: TOML files in ``data/``, each with its source.

Users may edit them; :mod:`kvell.cost.analytic` defines the fields.
"""

from dataclasses import fields
from pathlib import Path

from kvell.cost.analytic import DeviceProfile, LinkProfile
from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode_toml, read_bounded

HARDWARE_DIR = Path(__file__).with_name("data")
LINKS_DIR = HARDWARE_DIR / "links"
DEFAULT_HARDWARE = "a100-80"


def hardware_names(directory: Path = HARDWARE_DIR) -> list[str]:
    return sorted(path.stem for path in directory.glob("*.toml"))


def load_profile(name: str, directory: Path = HARDWARE_DIR) -> DeviceProfile:
    """Load a profile by name or by a TOML file's path.

    :raises ChangeSomething: if there is none, or a field is not a positive number.
    """
    stem, values = _read("--hardware", name, directory)
    rates = {x.name: _rate(values, x.name, name) for x in fields(DeviceProfile)[1:]}
    return DeviceProfile(stem, **rates)


def load_link(name: str, directory: Path = LINKS_DIR) -> LinkProfile:
    """Load a link by name or by a TOML file's path.

    :raises ChangeSomething: if there is none, or a field is not a positive number.
    """
    stem, values = _read("--link", name, directory)
    rates = {x.name: _rate(values, x.name, name, "--link") for x in fields(LinkProfile)[1:]}
    return LinkProfile(stem, **rates)


def _read(flag: str, name: str, directory: Path) -> tuple[str, dict[str, object]]:
    path = directory / f"{name}.toml"
    if name not in hardware_names(directory):
        path = Path(name)
    if path.suffix != ".toml" or not path.is_file():
        names = ", ".join(hardware_names(directory))
        raise ChangeSomething(flag, name, "is not a profile", f"use a TOML file or {names}")
    try:
        return path.stem, decode_toml(read_bounded(path).decode())
    except (MalformedError, UnicodeDecodeError, OSError) as error:
        raise ChangeSomething(flag, name, f"is not TOML ({error})", "repair it") from error


def _rate(raw: dict[str, object], field: str, name: str, flag: str = "--hardware") -> float:
    value = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ChangeSomething(flag, name, f"{field} is {value!r}", "give a number above zero")
    return float(value)
