"""How a part of a run declares its files: a constant PART beside the code that writes them.

run_files.py collects these constants. Together they are everything that a run may write, that `--overwrite` removes
and that a copy in object storage has; docs/reference/run-directory.md lists them.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Part(NamedTuple):
    """The files of one part of a run.

    `patterns`: regular expressions of their paths in the run directory. A slash separates two names of a path, and each
    name matches by itself. `.+` at the end matches at any depth; a slash at the end declares a folder without files.
    `documented`: the names that the documentation gives these files, and their content.
    """

    patterns: tuple[str, ...]
    documented: Mapping[str, str]
