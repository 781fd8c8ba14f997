"""A compiled pass of one layer, built by hand, whose values are a bias."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvell.models.fused import _forward
from kvell.models.fused.decoder import Way

HEAD_SIZE = 32
PAGE_TOKENS = 16
DTYPES = (torch.float32, torch.bfloat16)


def address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


@dataclass
class OneLayer:
    """All weights are zeros, so the values of every token are the last numbers of the bias.

    :ivar values: float32 [32], rounded as they are stored in the page.
    """

    instruction_set: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    values: torch.Tensor
    hidden: int = HEAD_SIZE
    kept: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        element, size = DTYPES.index(self.dtype), self.dtype.itemsize
        zeros = self._keep(torch.zeros(96 * self.hidden * size + 4096, dtype=torch.uint8))
        ones = self._keep(torch.ones(self.hidden))
        bias = self._keep(torch.cat([torch.zeros(2 * HEAD_SIZE), self.values]))
        norm, no_norm = (ones, 1e-6), (0, 0.0)
        qkv = (zeros, 0, bias, 3 * HEAD_SIZE, self.hidden, 0)
        unused = (zeros, 0, 0, HEAD_SIZE, HEAD_SIZE, 0)
        self.forward = _forward.Forward(
            self.instruction_set,
            element,
            (self.hidden, 1, 1, HEAD_SIZE, HEAD_SIZE),
            0,
            0.0,
            (zeros, 2, 1.0),
            norm,
            unused,
        )
        norms = [norm, no_norm, no_norm, no_norm, norm, no_norm]
        matrices = [qkv, unused, unused, unused]
        self.forward.add_layer(norms, matrices, (1.0, 1.0), -1, (1.0, 0.0, 0))
        self.pages = torch.zeros(2, PAGE_TOKENS, HEAD_SIZE, dtype=self.kv_dtype)
        layer = (address(self.pages), self.pages.nbytes, self.pages.nbytes, 0, PAGE_TOKENS, 1)
        self.forward.attach([(*layer, HEAD_SIZE, 0, DTYPES.index(self.kv_dtype))], [0], [])

    def run(
        self, tokens: int, threads: int = 1, begun: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        """The values of a step of a request's first tokens, as the page has them: [tokens, 32].

        :param begun: called when only the compiled pass is left to be run.
        """
        ids, positions = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
        starts = torch.tensor([0, tokens], dtype=torch.int32)
        lengths = torch.tensor([tokens], dtype=torch.int32)
        table = torch.tensor([0, 1], dtype=torch.int32)
        page = torch.zeros(tokens, dtype=torch.int32)
        offsets = torch.arange(tokens, dtype=torch.int32)
        tables = (address(starts), address(lengths), address(table))
        workspace = torch.empty(self.forward.workspace_bytes(tokens, 0), dtype=torch.uint8)
        scratch_bytes = self.forward.attention_bytes(threads, tokens)
        scratch = torch.empty(scratch_bytes + 4096, dtype=torch.uint8)
        begun()
        self.forward.run(
            (tokens, address(ids), address(positions)),
            (0, 0),
            [
                (
                    (1, *tables, address(page), address(page), 1, tokens),
                    address(page),
                    address(offsets),
                )
            ],
            [],
            (address(workspace), workspace.nbytes),
            (-(-address(scratch) // 4096) * 4096, scratch_bytes),
            0,
            False,
            Way(threads),
            None,
        )
        return self.pages[1, :tokens].clone()

    def _keep(self, tensor: torch.Tensor) -> int:
        """Its address, on a line of its own if it is bytes."""
        self.kept.append(tensor)
        return -(-address(tensor) // 64) * 64 if tensor.dtype == torch.uint8 else address(tensor)
