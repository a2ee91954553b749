"""The generated pages of the reference have all that is registered, every setting and every room."""

import re

from docs.generate import hooks, markdown, messages, pages
from rayfl.choices.kinds import named
from rayfl.experiment.experiment import Experiment
from rayfl.methods.base import Method
from tests.test_docs import DOCS, PAGES, text_of
from tests.test_floors import FLOOR


def test_the_rooms_are_shown_in_the_order_of_the_floors():
    shown = re.findall(r"^\| (`.*?) \|", text_of(DOCS / "explanations" / "architecture.md"), flags=re.MULTILINE)
    floors = [FLOOR[room] for row in shown for room in re.findall(r"`(\w+)(?:/|\.py)`", row)]
    assert floors == sorted(floors, reverse=True) and len(floors) == len(FLOOR)


def test_every_generated_section_has_its_page():
    shown = {mark for page in PAGES for mark in hooks.MARK.findall(text_of(page))}
    short = {name for name in pages.SECTIONS if name.endswith("-table")}
    assert set(pages.SECTIONS) - short <= shown <= set(pages.SECTIONS)


def test_the_reference_has_all_that_is_registered_and_every_setting():
    for kind, name in pages.COMMANDS.items():
        for word, one in named(kind).items():
            made = markdown.settings_table(one)
            fields = getattr(getattr(one, "Hyper", one), "model_fields", {})
            assert [key for key in fields if f"| `{key}` |" not in made] == [], word
        if kind is Method:
            assert all(f"({word}.md)" in pages.methods_section() for word in named(kind))
        else:
            assert all(f"## {word}\n" in pages.SECTIONS[name]() for word in named(kind))


def test_the_reference_of_the_experiment_has_every_table():
    made = pages.experiment_section()
    assert [key for key in Experiment.model_fields if f"`{key}`" not in made and f"[{key}]" not in made] == []
    assert "| `deadline_s` |" in made and "| `call_timeout_s` |" in made


def test_a_method_page_weighs_what_is_sent():
    sent, metrics = messages.measured("fedavg")
    by_name = {(one.name, one.direction): one for one in sent}
    # 64 x 10 + 10 + 10 x 10 + 10 parameters of four bytes, and a count of eight.
    assert by_name["delta", "up"].num_bytes == by_name["model", "down"].num_bytes == (3040,) * 4
    assert by_name["num_examples", "up"].num_bytes == (8,) * 4 and len(sent) == 3
    assert {"pooled/accuracy", "train/loss"} <= metrics
    page = pages.method_page("fedavg", named(Method)["fedavg"])
    assert "McMahan et al., Communication-Efficient Learning" in page and "| `delta` | up | 3,040 | every |" in page


def test_a_docstring_stays_as_it_is_written():
    text = "Steps a_i*b:\n- one <- two\n  goes on\n- `x_y`\nThe end.\n\n    z^(k) = |z|\n"
    assert markdown.as_markdown(text) == (
        "Steps a\\_i\\*b:\n\n- one &lt;- two\n  goes on\n- `x_y`\n\nThe end.\n\n    z^(k) = |z|"
    )
