"""The page of other systems' flags is made from the table that the command line uses."""

from kvell.cli.main import root
from kvell.equivalents.table import EQUIVALENTS, VALUES
from scripts.reference.equivalents import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page()


def test_no_entry_hides_a_flag_of_kvell() -> None:
    flags = {name for option in root.commands["serve"].params for name in option.opts}
    hidden = [name for entry in EQUIVALENTS for name in entry.names if name in flags]
    assert hidden == []
    assert VALUES.keys() <= flags
