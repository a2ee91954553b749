"""A plugin file imports files beside it, which are kept with the run and are found by no other file."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rayfl.choices import plugins
from rayfl.choices.kinds import find
from rayfl.methods.base import Method
from tests.actors.toys import assert_same_run
from tests.choices.conftest import EXPERIMENT, METHOD
from tests.jobs.commands import rayfl
from tests.refusals import refused

HELPED = (
    METHOD
    + """

from halves import HALF, Base, later


class Helped(Halved, Base):
    def evaluate_later(self):
        from lazy import WORD

        return HALF, later(), WORD
"""
)


def helped(folder: Path, half: float = 0.5) -> Path:
    """A folder with a method that imports a file, which imports another, and one more in a function."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(HELPED)
    (folder / "halves.py").write_text(
        f"import deeper\n\nHALF = {half}\n\nclass Base:\n    pass\n\nlater = deeper.call\n"
    )
    (folder / "deeper.py").write_text(f"def call():\n    from lazy import WORD\n\n    return WORD, {half}\n")
    (folder / "lazy.py").write_text("WORD = 'lazy'\n")
    (folder / "own.toml").write_text(EXPERIMENT.replace(":Halved", ":Helped"))
    return folder


def test_a_file_imports_what_lies_beside_it_and_not_what_lies_beside_another(tmp_path: Path) -> None:
    one, other = helped(tmp_path / "one", half=0.5), helped(tmp_path / "other", half=0.25)
    first, second = (find(Method, f"{folder}/mine.py:Helped") for folder in (one, other))
    assert first.evaluate_later(None) == (0.5, ("lazy", 0.5), "lazy")
    assert second.evaluate_later(None) == (0.25, ("lazy", 0.25), "lazy")
    assert not {"halves", "deeper", "lazy"} & sys.modules.keys()
    assert find(Method, f"{helped(tmp_path / 'copy')}/mine.py:Helped") is first, "a copy is the same module"
    (one / "other.py").write_text("from halves import Base\n")
    assert issubclass(first, plugins.load(f"{one}/other.py:Base")), "both import one module"
    sent = tmp_path / "sent"
    sent.write_bytes(pickle.dumps({"files": plugins.loaded_files(), "method": first}))
    for path in one.iterdir():
        path.unlink()
    program = f"import pickle; print(pickle.load(open({str(sent)!r}, 'rb'))['method'].evaluate_later(None))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "(0.5, ('lazy', 0.5), 'lazy')\n", done.stderr


def test_a_file_with_a_name_of_pythons_or_of_its_own_hides_no_module(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("1 / 0\n")
    (tmp_path / "numpy.py").write_text(
        "import random\n\nimport numpy\n\nsize = numpy.int64(3) + random.randint(1, 1)\n"
    )
    assert plugins.load(f"{tmp_path}/numpy.py:size") == 4


def test_a_file_beside_raises_its_own_error_where_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "fast.py").write_text("import no_such_package\n")
    (tmp_path / "mine.py").write_text(
        "try:\n    import fast\nexcept ImportError:\n    fast = 'none'\n\ndef later():\n    import broken\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    assert plugins.load(f"{tmp_path}/mine.py:fast") == "none"
    with pytest.raises(ZeroDivisionError):
        plugins.load(f"{tmp_path}/mine.py:later")()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = = 2\n", ["deeper.py", "line 1", "invalid syntax"]),
        ("1 / 0\n", ["deeper.py:1", "ZeroDivisionError"]),
        ("import halves\n", ["deeper.py:1", "ModuleNotFoundError", "halves.py", "`import halves`"]),
        ("__import__('importlib').import_module('lazy')\n", ["deeper.py:1", "lazy.py", "`import lazy`"]),
    ],
    ids=["syntax", "error", "circle", "call"],
)
def test_a_file_beside_that_fails_is_named(home: Path, source: str, names: list[str]) -> None:
    (helped(home) / "deeper.py").write_text(source)
    refused(rayfl("run", "mine/own.toml"), names=names)


def test_a_run_keeps_what_its_file_imports_and_is_resumed_from_the_copies(home: Path) -> None:
    helped(home)
    for output, rounds in (("long", 3), ("short", 2)):
        result = rayfl("run", "mine/own.toml", "--inline", "--rounds", rounds, "--output", output)
        assert result.exit_code == 0, result.output
    copies = sorted(Path("short/files").glob("plugin-*/*"))
    assert [path.name for path in copies] == ["deeper.py", "halves.py", "lazy.py", "mine.py"]
    # Other code, also where only a file beside it has changed.
    (home / "deeper.py").write_text("def call():\n    pass\n")
    changed = ["method.name", Path("short").absolute(), "files/plugin-"]
    refused(rayfl("resume", "short", "--rounds", 3, "method.name=mine/mine.py:Helped"), names=changed)
    for path in home.glob("*.py"):
        path.unlink()
    result = rayfl("resume", "short", "--rounds", 3)
    assert result.exit_code == 0, result.output
    assert sorted(Path("short/files").glob("*/*")) == copies
    copy = copies[1]
    copy.write_text((source := copy.read_text()) + "\n")
    refused(rayfl("resume", "short", "--rounds", 4), names=changed)
    copy.write_text(source)
    assert_same_run(Path("long"), Path("short"))
