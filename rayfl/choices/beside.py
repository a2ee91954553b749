"""Files that a plug-in file reads beside itself: found by their names in its source, and kept with it.

A source that can find its own folder runs in a folder of its own, which has only those files of the original folder
whose names are texts in the source. So it reads the same files when a run is resumed, and on every node, and another
file is missing from the beginning. If Python opens one, or lists the folder, or writes to it, a sentence says so.
"""

import ast
import atexit
import linecache
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from secrets import token_hex

from rayfl.errors import PLUGIN_MODULES, RayflError
from rayfl.limits.memory import in_words
from rayfl.limits.regular_files import expanded, is_folder, read_bytes
from rayfl.untyped import Foreign

MOST_BYTES = 64 << 20
"""A larger file is not kept, because every process gets it, and every run directory."""
_FINDING = ("__file__", "getfile", "getsourcefile")
"""Words of a source that can find its own folder."""
_placed: dict[Path, Path] = {}
"""The folders of plug-ins by those in which this process runs their copies."""


def read_beside(folder: Path, source: str, stem: str, alias: str) -> dict[str, bytes]:
    """The source, and the files in `folder` that it names, by their paths below it; {} if it cannot find its folder.

    stem: the plug-in file's name there, without .py; it runs under the name `alias`. A text such as ".json" names the
    file that has this ending in place of .py. Raise OSError if a file cannot be read.
    """
    if not any(word in source for word in _FINDING):
        return {}
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    names = {part for text in texts if isinstance(text, str) for part in text.split("/")} - {"", ".", ".."}
    paths = {path.relative_to(folder).as_posix(): path for path in _named(folder, names - {f"{stem}.py"})}
    for ending in names - {".py"}:
        if ending.startswith(".") and _is_kept(path := folder / f"{stem}{ending}"):
            paths[f"{alias}{ending}"] = path
    return {f"{alias}.py": source.encode()} | {name: read_bytes(path) for name, path in sorted(paths.items())}


def _named(folder: Path, names: set[str], around: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The files at any depth in `folder` whose names, and those of the folders to them, are among `names`."""
    around = (*around, Path(os.path.realpath(folder)))
    for path in (folder / name for name in names):
        # A text of any kind may be no name, or that of a link in a circle.
        with suppress(OSError, ValueError):
            if is_folder(path, around):
                yield from _named(path, names, around)
            elif _is_kept(path):
                yield path


def _is_kept(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= MOST_BYTES


def placed(folder: Path, digest: str, contents: Mapping[str, bytes]) -> Path:
    """The path at which a plug-in file in `folder` runs: beside only `contents`, of which it is the first."""
    home = _homes() / digest
    # What `_refuse` says of a plug-in does not hold for this function.
    _placed.pop(home, None)
    for path, content in ((home / name, content) for name, content in contents.items()):
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Other processes write the same.
            partial = path.with_name(f"{path.name}-{token_hex(8)}")
            partial.write_bytes(content)
            partial.replace(path)
    _placed[home] = folder
    return home / next(iter(contents))


@cache
def _homes() -> Path:
    """The folder for folders of plug-ins: in the user's cache, or else a temporary one."""
    with suppress(OSError, RayflError):
        home = Path(os.path.realpath(expanded("~/.cache/rayfl/plugins")))
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    home = Path(tempfile.mkdtemp(prefix="rayfl-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


@cache
def watch() -> None:
    """Refuse from now on what plug-in files do with files beside them and a resumed run could not."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Foreign, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir") or not isinstance(arguments[0], str | os.PathLike):
        return
    path = Path(os.fsdecode(arguments[0]))
    reads = event == "open" and arguments[2] & os.O_ACCMODE == os.O_RDONLY
    home = next((home for home in _placed if path.is_relative_to(home)), None)
    if home is not None:
        original = _placed[home] / path.relative_to(home)
        if not reads:
            raise _refusal(f"{'writes to' if event == 'open' else 'lists'} {original}")
        if original.exists() and not path.exists():
            raise _refusal(f"reads {original}, which it does not name or which is larger than {in_words(MOST_BYTES)}")
    elif reads and not path.is_absolute() and (file := _reader(path)):
        raise _refusal(f"reads {path} in the current folder ({file}); write Path(__file__).with_name({path.name!r})")


def _refusal(deed: str) -> RayflError:
    return RayflError(
        f"a plug-in {deed}: a resumed run has those files beside it whose names are texts in it, and no others; a "
        "setting may give another path"
    )


def _reader(path: Path) -> str | None:
    """The plug-in file that names and opens `path`, which lies beside it; None for one that is opened otherwise."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(2))]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    first = next((n for n, name in enumerate(modules) if name.startswith((PLUGIN_MODULES, "importlib."))), None)
    # What a source of data reads is named by its method `files`.
    if first is None or modules[first].startswith("importlib.") or "rayfl.data.loading" in modules:
        return None
    file = frames[first].f_code.co_filename
    named = file in linecache.cache and path.name in "".join(linecache.getlines(file))
    beside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(os.path.dirname(file)))
    return file if named and beside and path.exists() else None
