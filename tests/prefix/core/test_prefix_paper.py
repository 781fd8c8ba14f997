"""Golden tests: figures of the Jenga paper, as far as they can be read.

The paper counts *earlier* tokens as its window, so its 2 is our 3; pages have one token.
"""

import numpy as np

from kvell.pages.layout import GroupKind, LayerSpec
from kvell.pages.sizing import plan_layout
from kvell.prefix.groups.policies import policy_of
from tests.oracle.index.hits import Found
from tests.oracle.index.possible import possible_prefixes
from tests.oracle.index.seen import empty_larges
from tests.pages.pools import group, images, pool_of
from tests.prefix.mixes import Prompt, text
from tests.prefix.rehearsal import Rehearsal
from tests.prefix.story import Story


def test_fig_6_two_levels_for_llama_vision() -> None:
    """128 bytes per layer: 2 cross layers, 3 of text; LCM(256, 384) = 768."""
    layers = [LayerSpec(i, GroupKind.CROSS, 1, 32, 2) for i in range(2)]
    layers += [LayerSpec(i, GroupKind.FULL, 1, 32, 2) for i in range(2, 5)]
    layout = plan_layout(layers, 768 * 640, page_tokens=1)
    assert layout.large_page_bytes == 768
    assert [g.page_stride_bytes for g in layout.groups] == [256, 384]
    assert [g.pages_per_large for g in layout.groups] == [3, 2]
    rehearsal = Rehearsal(layout)
    four_image_tokens = np.asarray([[0, 1, 4]], np.int32)
    request = rehearsal.serve(Prompt([-1, 7], four_image_tokens), 2)
    cross, text = rehearsal.pages(request)
    assert (len(cross), len(text)) == (4, 2)
    state = rehearsal.check()
    assert [state.group.count(g) for g in range(2)] == [2, 1], "large pages 0, 2 and 1"


def test_fig_8_request_aware_allocation_frees_whole_large_pages() -> None:
    """Four small pages in a large one; A and B grow in turn, and A ends."""
    story = Story(pool_of(4, group(1, 4)))
    a, b = story.open([1] * 8, expected=8), story.open([2] * 8, expected=8)
    for until in range(1, 9):
        story.grow(a, until)
        story.grow(b, until)
    of_a, of_b = ({page // 4 for page in story.pages(h, 0).values()} for h in (a, b))
    assert len(of_a) == len(of_b) == 2
    assert not of_a & of_b
    story.close(a)
    assert empty_larges(story.check()) == 2


def test_fig_10_access_times_are_balanced_over_groups() -> None:
    """[A B C D] → E F, then [A B C D G] → H.

    Step 2 renews C D E, step 3 C D G; [E] goes before [C D G] in both layers, and what
    the windows left behind before anything else.
    """
    story = Story(pool_of(20, group(1, 1), group(1, 1, window=3)))
    a, b, c, d, e, g = range(6)
    story.next_step()
    first = story.open([a, b, c, d])
    story.compute(first, 4)
    assert sorted(story.pages(first, 1)) == [1, 2, 3], "step 1: the window of D"
    story.decode(first, e)
    assert sorted(story.pages(first, 1)) == [2, 3, 4], "step 2: C D E"
    story.close(first)
    story.next_step()
    second = story.open([a, b, c, d, g])
    assert story.core.hit_tokens(second) == 4
    story.compute(second, 5)
    assert sorted(story.pages(second, 1)) == [2, 3, 4], "step 3: C D G"
    story.close(second)
    full, sliding = orders(story)
    assert {t: k[1] for t, k in full.items()} == {"A": 3, "B": 3, "C": 3, "D": 3, "E": 2, "G": 3}
    assert {t: k[1] for t, k in sliding.items() if t in "CDEG"} == {"C": 3, "D": 3, "E": 2, "G": 3}
    assert sorted(full, key=lambda t: full[t]) == ["E", "G", "D", "C", "B", "A"]
    assert sorted(sliding, key=lambda t: sliding[t]) == ["A", "B", "E", "G", "D", "C"]


def orders(story: Story) -> list[dict[str, tuple[int, int, int]]]:
    """Per group: letter of the cached token → its key. E and G are both the fifth."""
    state = story.check()
    found: list[dict[str, tuple[int, int, int]]] = [{}, {}]
    for entry in state.index:
        key = state.keys[entry.group][entry.page]
        letter = "ABCD"[entry.end - 1] if entry.end < 5 else "EG"[key[1] - 2]
        found[entry.group][letter] = key
    return found


def test_fig_11_the_longest_prefix_that_both_layers_can_resume_from() -> None:
    """Full has A–I, sliding C D H I J: prefixes of 4 and of 9 tokens in both."""
    full, sliding = group(1, 1), group(1, 1, window=3)
    found: list[Found] = [
        {(1 + "ABCDEFGHIJ".index(letter), 0): 0 for letter in letters}
        for letters in ("ABCDEFGHI", "CDHIJ")
    ]
    hits = [[(n, 0) in pages for n in range(1, 11)] for pages in found]
    policies = [policy_of(full), policy_of(sliding)]
    possible = [set(possible_prefixes(p, h)) for p, h in zip(policies, hits, strict=True)]
    assert possible[0] & possible[1] == {4, 9}


def test_fig_12a_embeddings_go_as_prefill_consumes_them() -> None:
    """t0 i0 i1 i2 i3 t1 in chunks of 3: pages of keys and values, and of embeddings."""
    layout = pool_of(20, group(1, 1), images(GroupKind.VISION, 1, 1))
    rehearsal = Rehearsal(layout)
    prompt = Prompt([5, -1, -1, -1, -1, 6], np.asarray([[1, 4, 4]], np.int32))
    request = rehearsal.open(prompt, "", "")
    timeline = []
    for until in (3, 6):
        assert rehearsal.grow([request], [until]) == 1
        timeline.append([len(pages) for pages in rehearsal.pages(request)])
        rehearsal.compute([request], [until])
        timeline.append([len(pages) for pages in rehearsal.pages(request)])
    assert timeline == [[3, 4], [3, 2], [6, 2], [6, 0]]
    snapshot = rehearsal.check()
    assert len(snapshot.keys[1]) == 4, "consumed: nobody's, but cached while memory is idle"
    other = rehearsal.open(text(*range(10, 24)), "", "")
    assert rehearsal.grow([other], [14]) == 1, "all that is not keys and values is there to take"
    assert rehearsal.check().keys[1] == {}
