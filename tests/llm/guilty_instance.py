"""``kvell instance`` whose model raises when it computes a certain token; arguments are its own."""

from typing import Any

from kvell.cli.main import main
from kvell.models.paged_model import PagedModel

GUILTY = 999


def raising(forward: Any) -> Any:
    def raises(self: PagedModel, batch: Any, *more: Any) -> Any:
        if (batch.token_ids == GUILTY).any():
            raise ValueError("a secret of the inside")
        return forward(self, batch, *more)

    return raises


if __name__ == "__main__":
    PagedModel.forward = raising(PagedModel.forward)  # type: ignore[method-assign]
    main()
