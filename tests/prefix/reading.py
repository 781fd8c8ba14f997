"""One step of one request: all it reads must be there, all it writes must be its own."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.pages.snapshot import PoolSnapshot
from kvell.prefix.groups.facts import Facts, ImageSpan
from tests.prefix.contents import PARTS, Contents, slots_of
from tests.prefix.mixes import Prompt
from tests.prefix.obvious import drops, reads

Pages = dict[int, int]
"""Position → page."""


@dataclass
class Request:
    handle: int
    model: str
    root: str
    prompt: Prompt
    facts: Facts
    own: list[tuple[int, GroupSpec]]
    tokens: list[int]
    chain: list[int]
    computed: int
    lease_until: int | None = None
    shown: dict[int, int] = field(default_factory=dict)
    """By an image's first token: the number of its content, whatever comes before it."""


class Reader:
    """Reads and writes the contents of pages for requests."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def run(self, request: Request, pages: list[Pages], until: int, state: PoolSnapshot) -> None:
        """The request computes its tokens up to ``until``."""
        if until == request.computed:
            return
        for index, group in request.own:
            turn = Turn(self._contents, request, index, group, pages[index], until, state)
            if group.kind is GroupKind.STATE:
                turn.state_group()
            elif group.kind is GroupKind.CROSS:
                turn.cross()
            elif group.kind is GroupKind.VISION:
                turn.vision()
            else:
                turn.tokens()

    def drop(self, request: Request, before: int, pages: list[Pages], state: PoolSnapshot) -> None:
        """A prompt just computed is moved together to what is kept of it."""
        for index, group in request.own:
            if drops(group, request.facts) and before < request.facts.prompt_tokens:
                turn = Turn(
                    self._contents, request, index, group, pages[index], request.computed, state
                )
                turn.write(0, turn.flat(request.computed))

    def write_state(self, group: int, page: int, prefix: int, part: int) -> None:
        self._contents.write(group, {0: page}, 0, [prefix * PARTS + part])


@dataclass(frozen=True)
class Turn:
    contents: Contents
    request: Request
    index: int
    group: GroupSpec
    pages: Pages
    until: int
    state: PoolSnapshot

    def write(self, start: int, values: list[int]) -> None:
        """Into pages that nobody else uses, and that no prefix is promised in."""
        size = slots_of(self.group)
        for position in range(start // size, -(-(start + len(values)) // size)):
            page = self.pages[position]
            assert self.state.refs[self.index][page] == 1, "writes what another reads"
            assert page not in self.state.keys[self.index], "writes what is in the index"
        self.contents.write(self.index, self.pages, start, values)

    def read(self, start: int, values: list[int]) -> None:
        found = self.contents.read(self.index, self.pages, start, start + len(values))
        assert found == values, f"group {self.index} reads wrong tokens from slot {start} on"

    def flat(self, length: int) -> list[int]:
        """What the slots of a token group hold when so many tokens are computed."""
        request, facts = self.request, self.request.facts
        if drops(self.group, facts) and length >= facts.prompt_tokens:
            return request.chain[facts.prompt_tokens - self.group.window_tokens : length]
        if not (self.group.counts_images and facts.images):
            return request.chain[:length]
        values: list[int] = []
        at = {image.start: image for image in facts.images}
        for token in range(length):
            values.append(request.chain[token])
            if token in at:
                values.extend([-request.chain[token]] * at[token].image_tokens)
        return values

    def tokens(self) -> None:
        computed = self.request.computed
        before = self.flat(computed)
        first = 0
        if self.group.kind in (GroupKind.SLIDING, GroupKind.CHUNKED):
            reach = (t for t in range(computed) if reads(self.group, computed, t))
            first = next(reach, computed)
        if self.group.kind is GroupKind.FULL:
            first = self.request.facts.away_tokens  # another instance reads those
        if not self.group.required_for_hit:
            self._refill(before)
        self.read(first, before[first:])
        if self.group.holds_embeddings:
            self._embeddings()
        after = self.flat(self.until)
        if drops(self.group, self.request.facts) and self._passes_prompt():
            after = self.request.chain[: self.until]
        self.write(len(before), after[len(before) :])

    def _passes_prompt(self) -> bool:
        return self.request.computed < self.request.facts.prompt_tokens <= self.until

    def _refill(self, before: list[int]) -> None:
        """A drafter computes again what it did not find, from the first page it has on."""
        size = self.group.page_tokens
        for slot in range(min(self.pages) * size, len(before)):
            if self.contents.read(self.index, self.pages, slot, slot + 1) != [before[slot]]:
                self.write(slot, [before[slot]])

    def _embeddings(self) -> None:
        """Written for a whole image when it begins, read token by token, overwritten."""
        for image in self._begun():
            marks = [-number for number in self.request.chain[image.start : image.end]]
            if image.start >= self.request.computed:
                self.write(image.start, marks)
            start = max(self.request.computed, image.start)
            self.read(start, marks[start - image.start : self.until - image.start])

    def state_group(self) -> None:
        chain, computed = self.request.chain, self.request.computed
        parts = range(self.group.slices)
        before = [chain[computed - 1] * PARTS + part for part in parts] if computed else []
        if not self.group.required_for_hit:
            self.write(0, before)
        self.read(0, before)
        self.write(0, [chain[self.until - 1] * PARTS + part for part in parts])

    def cross(self) -> None:
        for image, position in self._placed():
            if image.start >= self.request.computed:
                self.write(position * self.group.page_tokens, self._image(image))
            self.read(position * self.group.page_tokens, self._image(image))

    def vision(self) -> None:
        """The rest of each image: from the token that prefill is at.

        What an image of the same content has left behind is not computed again.
        """
        size = self.group.page_tokens
        for image, position in self._placed():
            values = self._image(image)
            done = max(0, self.request.computed - image.start)
            if not done and not self._is_there(position * size, values):
                self.write(position * size, values)
            if done < image.tokens:
                used = done * image.image_tokens // image.tokens // size * size
                self.read(position * size + used, values[used:])

    def _image(self, image: ImageSpan) -> list[int]:
        size, prefix = self.group.page_tokens, self.request.chain[image.end - 1]
        if self.group.kind is GroupKind.VISION:
            prefix = self.request.shown[image.start]
        return [prefix * PARTS + token // size for token in range(image.image_tokens)]

    def _is_there(self, start: int, values: list[int]) -> bool:
        end = start + len(values)
        return self.contents.read(self.index, self.pages, start, end) == values

    def _begun(self) -> Iterator[ImageSpan]:
        return (
            image
            for image in self.request.facts.images
            if image.start < self.until and image.end > self.request.computed
        )

    def _placed(self) -> Iterator[tuple[ImageSpan, int]]:
        position = 0
        for image in self.request.facts.images:
            if image.start < self.until:
                yield image, position
                position += -(-image.image_tokens // self.group.page_tokens)
