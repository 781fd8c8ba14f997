"""Loading, convolution, scan and storing of one layer's states in one step."""

from dataclasses import dataclass
from typing import Any

import torch

from kvell.attention.states import StateBatch
from kvell.models.states.scan_plan import Lane, ScanPlan
from kvell.models.states.scans import Advance, Scan
from kvell.models.states.state_pages import StatePages


@dataclass(frozen=True)
class StateRun:
    """A step's input for a mixer: T new tokens, n requests, c cuts."""

    pages: StatePages
    batch: StateBatch
    plan: ScanPlan

    def convolve(self, inputs: torch.Tensor, convolution: Any) -> torch.Tensor:
        """Convolve every channel causally over each request's own tokens.

        Requests are laid out one after another, each preceded by the earlier inputs that its
        first token reads.  Windows that straddle two requests are computed but not taken.

        :param inputs: [T, channels].
        :param convolution: a depthwise ``Conv1d`` of window + 1 places, of which the last is
            the token itself; only its weight and bias are used.
        :returns: [T, channels] in the inputs' dtype.
        """
        plan, window = self.plan, self.pages.shapes.window
        before = self.pages.load_window(self._running, plan.fresh)
        tokens = torch.arange(len(inputs), device=inputs.device) + plan.request_of_row * window
        count = len(plan.ends)
        laid_out = before.new_empty((len(inputs) + count * window, inputs.shape[1]))
        laid_out.index_copy_(0, tokens + window, inputs.to(before.dtype))
        requests = torch.arange(count, device=inputs.device)
        places = torch.arange(window, device=inputs.device)
        starts = torch.cat((plan.ends.new_zeros(1), plan.ends[:-1]))
        own = (starts + requests * window)[:, None] + places
        laid_out.index_copy_(0, own.flatten(), before.transpose(1, 2).flatten(0, 1))
        last = (plan.ends + requests * window)[:, None] + places
        going_on, pages = self._going_on(self.batch.end_page_ids)
        ends = _windows(laid_out, last)
        self.pages.store_window(pages, ends if going_on is None else ends[going_on])
        if len(plan.cut_ends):
            cut = (plan.cut_ends + plan.cut_requests * window)[:, None] + places
            self.pages.store_window(self._kept, _windows(laid_out, cut))
        weight = convolution.weight.squeeze(1).float()
        convolved = _convolved(laid_out.float(), weight, convolution.bias)
        return convolved.index_select(0, tokens).to(inputs.dtype)

    def scan(self, scan: Scan, *inputs: torch.Tensor) -> torch.Tensor:
        """Run a recurrence over inputs [T, …], all float32; return [T, …]."""
        states = self.pages.load_recurrent(self._running, self.plan.fresh)
        output: torch.Tensor | None = None
        for lane in self.plan.lanes:
            state = states if lane.requests is None else states.index_select(0, lane.requests)
            advance = scan.prepare(*(lane.take(values) for values in inputs))
            done = self._scan_lane(lane, advance, state)
            if output is None:
                output = done.new_empty((len(inputs[0]), *done.shape[2:]))
            lane.put(done, output)
        assert output is not None, "a step has tokens"
        return output

    def _scan_lane(self, lane: Lane, advance: Advance, state: torch.Tensor) -> torch.Tensor:
        """Run all rounds of a lane, store its states and return its outputs [P, L, …]."""
        outputs = []
        for now in lane.rounds:
            running = now.end - now.first
            done, advanced = advance(now.first, now.end, state[:running])
            state = torch.cat((advanced, state[running:])) if running < len(state) else advanced
            outputs.append(done)
            if now.cuts is not None and now.cut_ranks is not None:
                kept = self._kept.index_select(0, now.cuts)
                self.pages.store_recurrent(kept, state.index_select(0, now.cut_ranks))
        ends = self.batch.end_page_ids
        chosen = ends if ends is None or lane.requests is None else ends[lane.requests]
        going_on, pages = self._going_on(chosen)
        if going_on is not None:
            state = state[going_on]
        elif lane.requests is not None:
            pages = pages.index_select(0, lane.requests)
        self.pages.store_recurrent(pages, state)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _going_on(self, ends: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the indices of the end states that are stored (None for all), and their pages."""
        if ends is None:
            return None, self._running
        pages = ends[:, self.pages.part]
        going_on = (pages >= 0).nonzero().squeeze(1)
        return going_on, pages[going_on]

    @property
    def _running(self) -> torch.Tensor:
        """[n], the page of each running state that holds this layer."""
        return self.batch.page_ids[:, self.pages.part]

    @property
    def _kept(self) -> torch.Tensor:
        """[c], the page of each cut's state that holds this layer."""
        return self.batch.cut_page_ids[:, self.pages.part]


def _windows(laid_out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Gather rows [m, window] of [·, channels] as [m, channels, window]."""
    return laid_out[rows].transpose(1, 2)


def _convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Convolve [M, channels] → [M − window, channels]; always sum in the same order."""
    size = weight.shape[1]
    count = len(inputs) - size + 1
    output = inputs[:count] * weight[:, 0]
    if bias is not None:
        output += bias.float()
    for place in range(1, size):
        output.addcmul_(inputs[place : place + count], weight[:, place])
    return output
