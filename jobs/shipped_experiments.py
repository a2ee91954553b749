"""The experiments that come with rayfl, found by name from anywhere, and the file that `rayfl init` writes.

Nothing here loads torch, so that a list of names comes at once.
"""

import re
import tomllib
from pathlib import Path

from rich.table import Table
from rich.text import Text

from jobs.display import first_sentence
from rayfl.errors import RayflError, did_you_mean

FOLDER = Path(__file__).parent / "experiments"
TEMPLATE = Path(__file__).parent / "experiment_template.toml"


def names() -> list[str]:
    """The names of the experiments that come with rayfl."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def experiment_file(name_or_path: Path) -> Path:
    """The file that a command was given, or the shipped experiment of that name.

    Raise RayflError if `name_or_path` is a bare word that is neither.
    """
    if name_or_path.is_file() or name_or_path.suffix or name_or_path.name != str(name_or_path):
        return name_or_path
    if name_or_path.name in names():
        return FOLDER / f"{name_or_path.name}.toml"
    here = [path.name for path in Path().glob("*.toml") if path.name != "pyproject.toml"]
    raise RayflError(
        f"there is no file {name_or_path} and no experiment of that name: "
        f"{did_you_mean(name_or_path.name, [*names(), *here])}"
    )


def table() -> Table:
    """The experiments that come with rayfl: names, data, descriptions."""
    listed = Table("name", "data", "what it shows")
    for name in names():
        text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
        data = tomllib.loads(text)["data"]
        listed.add_row(name, data if isinstance(data, str) else data["name"], Text(first_comment_sentence(text)))
    return listed


def first_comment_sentence(text: str) -> str:
    """The first sentence of the comment at the beginning of a file; "" if there is none."""
    comment = re.match(r"(#.*\n)*", text)
    return first_sentence((comment[0] if comment else "").replace("#", " "))
