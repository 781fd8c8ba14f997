"""What is taken out of a Markdown file, and where it stood."""

from tests.docs.fences import blocks_of

TEXT = """# First

```console
$ kvell plan \\
    --model smollm2
an answer
$ kvell top
```

words

## Second

```python
# not a heading
x = 1
```

```
plain
```
"""


def test_blocks_know_their_heading_language_and_line() -> None:
    told = [(one.language, one.heading, one.line) for one in blocks_of(TEXT)]
    assert told == [("console", "First", 4), ("python", "Second", 15), ("", "Second", 20)]


def test_the_text_of_a_block_is_what_stands_in_it() -> None:
    assert blocks_of(TEXT)[1].text == "# not a heading\nx = 1\n"


def test_commands_are_lines_after_a_prompt_with_what_they_go_on_in() -> None:
    console, python, _ = blocks_of(TEXT)
    assert [" ".join(one.split()) for one in console.commands] == [
        "kvell plan --model smollm2",
        "kvell top",
    ]
    assert python.commands == []


def test_a_text_without_blocks_has_none() -> None:
    assert blocks_of("# Only words\n") == []
