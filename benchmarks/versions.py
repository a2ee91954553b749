"""The benchmark `versions`: whether rayfl works with the lowest versions that pyproject.toml allows, and the pinned.

Each set is installed into a virtual environment: the lowest version of every direct dependency, and the versions of
constraints.txt. There rayfl plays the demo in one process and on Ray, and the tests of the rooms that compute run. On
Linux the lowest torch is a CUDA build, so pip downloads about 3 GB; UV_TORCH_BACKEND=cpu in the environment takes
torch's own index of smaller builds instead.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.environments import ROOT, Environment, Failed, cell, print_row
from benchmarks.figures import Column, Figures, Results
from rayfl.errors import RayflError

ROOMS = ("contracts", "methods", "compress", "data", "models", "determinism", "rounds")
"""The folders of tests that run."""
SHOWN = ("torch", "numpy", "pandas", "pyarrow", "ray")
"""The packages whose versions the table shows."""
LOWEST, PINNED = "lowest", "pinned"
_INSTALL_S, _TESTS_S = 1800, 3600
"""Seconds that the installation, and the tests, may take."""
_VERSIONS = (
    "import importlib.metadata as m, sys; print(*(f'{name} {m.version(name)}' for name in sys.argv[1:]), sep=', ')"
)


def bench_versions(names: Sequence[str], results: Results) -> int:
    """Try the sets, print a Markdown table, and write `results`. Return an exit code: 1 if a check failed."""
    results.require()
    if wrong := {*names} - {LOWEST, PINNED}:
        raise RayflError(f"{min(wrong)!r} is no set of versions: give {LOWEST} or {PINNED}, or nothing for both")
    columns = ["versions", "packages", "one process", "on Ray", "tests"]
    figures = Figures("versions", [Column(name) for name in columns])
    print_row(columns, heading=True)
    for name in names or (LOWEST, PINNED):
        with tempfile.TemporaryDirectory(prefix="versions") as folder:
            trial = Trial(Path(folder), name)
            checks: Sequence[Callable[[], str]] = (trial.packages, trial.inline, trial.on_ray, trial.tests)
            cells = [name, *map(cell, checks)]
        figures.add(*cells)
        print_row(cells)
    results.write(figures, python=sys.version.split()[0], rooms=ROOMS)
    return int(any("fails" in value for row in figures.rows for value in row.values()))


class Trial(Environment):
    """A set of versions in a virtual environment in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, with_pip=True)
        self.name = name

    def packages(self) -> str:
        """Install the set, and return its versions of the packages in SHOWN."""
        pip, project = ["-m", "pip", "install", "--quiet"], ["-e", f"{ROOT}[test]"]
        if self.name == LOWEST:
            uv = ["-m", "uv", "pip", "install", "--quiet", "--python", self.python, "--resolution", "lowest-direct"]
            commands = [[*pip, "uv"], [*uv, *project]]
        else:
            commands = [[*pip, "-c", str(ROOT / "constraints.txt"), *project]]
        for command in commands:
            code, text = self.result(command, limit_s=_INSTALL_S)
            if code:
                raise Failed(text[-300:])
        return self.output("-c", _VERSIONS, *SHOWN).strip()

    def tests(self) -> str:
        """Run the tests of ROOMS from the checkout; return how many pass. Raise Failed with the first that fail."""
        cache = f"cache_dir={self.folder / 'cache'}"
        words = ["-m", "pytest", "-n", "2", "--dist", "loadfile", "-o", cache, *(f"tests/{room}" for room in ROOMS)]
        code, text = self.result(words, limit_s=_TESTS_S, cwd=ROOT)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        passed = re.search(r"^(\d+) passed", text, re.MULTILINE)
        if code or not passed:
            raise Failed(f"{len(failed)} tests fail: {', '.join(failed[:3])}" if failed else text[-200:])
        return f"{passed[1]} pass"
