"""The run directory: the experiment, the records of its rounds, and its final models.

    experiment.json, experiment.toml   the resolved experiment, and the same as the user would write it
    platform.json                      machines and builds as those report them that compute; bits depend on them
    records/{rounds,clients,metrics}   Arrow IPC streams (.arrows) while running, Parquet (.parquet) once finished
    tensorboard/, mlflow/, wandb/      what the trackers write that the run asks for
    trackers.json                      how far MLflow and W&B have come (tracking.py)
    models/<name>.safetensors          final models; large ones as <name>-0000.safetensors, <name>-0001.safetensors, ...
    checkpoints/<rounds>/              the states from which a run resumes (checkpoint.py)
    files/                             copies of the experiment's input files (experiment/input_files.py)
    lock                               held by the process that writes here

Everything is Arrow, JSON, safetensors or text; nothing is pickled. How streams and Parquet relate: tables.py.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from safetensors import SafetensorError, safe_open

from rayfl.errors import RayflError, reason
from rayfl.limits import json_files
from rayfl.limits.regular_files import require_regular
from rayfl.run_directory.atomic_files import (
    Taken,
    lock,
    safetensors_errors,
    sync_directory,
    write_json,
    write_text,
    write_whole,
    writing,
)
from rayfl.run_directory.run_entries import make_directory, remove_directories, remove_entries, require_own_entries
from rayfl.run_directory.tables import SCHEMAS, Stream, read_table, table_path, tidy, up_to, write_table

# Nothing here imports torch before there are tensors: a list of runs needs none.
if TYPE_CHECKING:
    from torch import Tensor

    from rayfl.rounds.ledger import ClientRow, MetricRow, RoundRow

MODEL_BYTES = 128 << 20
"""A file of final models is closed when it is larger."""
_LET_GO_S = 1.0
"""Seconds for which a taken lock is tried again."""


@dataclass(frozen=True)
class Run:
    """The contents of a run directory. Tables have the columns of `SCHEMAS`, rows in the order they were recorded."""

    directory: Path
    experiment: Mapping[str, object]
    platform: Mapping[str, object]
    rounds: pa.Table
    clients: pa.Table
    metrics: pa.Table
    finished: bool


class Recorder:
    """Writes the records of one run; the only writer of its directory's records.

    Leaving the `with` block finishes the run (Parquet); leaving it by an exception keeps the streams, to be resumed.
    Every method raises DiskError where the disk refuses; then at most the last round is cut, and `resume` drops it.
    """

    def __init__(self, directory: Path) -> None:
        """Start new records in `directory`. RayflError if it holds records already."""
        records = directory / "records"

        def tables() -> Mapping[str, pa.Table]:
            if records.exists() and any(records.iterdir()):
                raise RayflError(f"{records} holds the records of an earlier run: resume that run or name another")
            return {name: schema.empty_table() for name, schema in SCHEMAS.items()}

        self._open(directory, tables)

    @classmethod
    def resume(cls, directory: Path, after_round: int) -> Self:
        """Go on after `after_round` (-1: from the start): what was recorded of later rounds is removed.

        RayflError if `directory` is no run, or if its records end before `after_round`.
        """

        def tables() -> Mapping[str, pa.Table]:
            run = read_run(directory)
            last = _last_round(run.rounds)
            if last < after_round:
                raise RayflError(
                    f"the records of {directory} end at round {last}, so it cannot resume after {after_round}"
                )
            return {name: tidy(up_to(getattr(run, name), after_round)) for name in SCHEMAS}

        recorder = cls.__new__(cls)
        recorder._open(directory, tables)
        return recorder

    def _open(self, directory: Path, begin: Callable[[], Mapping[str, pa.Table]]) -> None:
        """Lock the directory and open the streams; `begin` returns the tables to begin with."""
        self._directory = directory
        with self._writing(), ExitStack() as held, ExitStack() as opened:
            held.enter_context(locked(directory))
            tables = begin()
            self._last = _last_round(tables["rounds"])
            (directory / "records").mkdir(exist_ok=True)
            self._streams: dict[str, Stream] = {}
            for name, table in tables.items():
                self._streams[name] = self._stream(name, table)
                opened.callback(self._streams[name].close)
            sync_directory(directory / "records")
            self._opened, self._held = opened.pop_all(), held.pop_all()

    def _stream(self, name: str, table: pa.Table) -> Stream:
        """A stream that begins with `table` and takes the place of earlier records."""
        path = table_path(self._directory, name, "arrows")
        partial = path.with_name(path.name + ".partial")
        # What a kill left; a link there must not lead the writing elsewhere.
        partial.unlink(missing_ok=True)
        try:
            stream = Stream(partial, table)
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        table_path(self._directory, name, "parquet").unlink(missing_ok=True)
        return stream

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._directory, f"go on with: rayfl resume {self._directory}")

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows of each table so far."""
        return {name: stream.num_rows for name, stream in self._streams.items()}

    def round(self, row: "RoundRow", clients: Sequence["ClientRow"], metrics: Sequence["MetricRow"]) -> None:
        """Record one round. A kill afterwards loses nothing of it; a loss of power may, see `sync`."""
        assert row.round > self._last, f"round {row.round} recorded after round {self._last}"
        self._last = row.round
        with self._writing():
            # The rounds table comes last: a round that stands there has its other rows on record too.
            self._streams["metrics"].append(row.round, metrics)
            self._streams["clients"].append(row.round, clients)
            self._streams["rounds"].append(row.round, [row[1:]])

    def sync(self) -> None:
        """Make all rounds so far survive a loss of power: to be called before a checkpoint that relies on them."""
        with self._writing():
            for stream in self._streams.values():
                stream.sync()

    def close(self) -> None:
        """Finish: compact the streams to Parquet and remove them."""
        with self._writing(), self._held:
            self._opened.close()
            for name in SCHEMAS:
                table = read_table(self._directory, name)
                # Default argument: the lambda is called at once, but linters cannot know.
                write_whole(
                    table_path(self._directory, name, "parquet"), lambda path, table=table: write_table(path, table)
                )
            for name in SCHEMAS:
                table_path(self._directory, name, "arrows").unlink(missing_ok=True)

    def stop(self) -> None:
        """End without finishing: the streams stay as they are, to be resumed."""
        with self._writing(), self._held:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # Report the error that ended the run, not the failure to write it.
        with suppress(OSError):
            self.stop()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes from writing into a run directory. RayflError where one does, and still does a second
    later: a process that was killed holds its lock until the kernel has taken its memory back."""
    until = time.monotonic() + _LET_GO_S
    while True:
        try:
            held = lock(directory / "lock")
            break
        except Taken:
            if time.monotonic() > until:
                raise RayflError(f"{directory} is being written by a run that goes on; wait for it or end it") from None
            time.sleep(0.05)
    with held:
        yield


def _last_round(rounds: pa.Table) -> int:
    return rounds["round"][-1].as_py() if len(rounds) else -1


def rows_recorded(directory: Path) -> Callable[[int], dict[str, int]]:
    """A function that returns how many rows each table of a run has on a number of first rounds."""
    tables = {name: read_table(directory, name) for name in SCHEMAS}
    return lambda rounds: {name: len(up_to(table, rounds - 1)) for name, table in tables.items()}


@contextmanager
def new_run_directory(path: Path, overwrite: bool = False, *, absent: bool = False) -> Iterator[Path]:
    """The directory of `create_run_directory`; nothing is left of it where the run is refused (ValueError), or cannot
    be described (OSError). A run that has recorded a round stays.

    `absent`: FileExistsError where there is anything at `path`, an empty directory too.
    """
    made = make_directory(path) if absent else _create(path, overwrite)
    try:
        yield path
    except (ValueError, OSError) as error:
        described = (path / "experiment.json").is_file()
        if not described or (isinstance(error, ValueError) and not len(read_table(path, "rounds"))):
            with suppress(OSError):
                remove_entries(path)
                (path / "lock").unlink(missing_ok=True)
            remove_directories(made)
        raise


def create_run_directory(path: Path, overwrite: bool = False) -> Path:
    """An empty directory for a run.

    RayflError if `path` holds anything, unless `overwrite` is given and all that it holds, however deep, is an
    earlier run that is over; its lock stays. OSError where the disk refuses, and where another run takes `path` at the
    same moment.
    """
    _create(path, overwrite)
    return path


def _create(path: Path, overwrite: bool) -> list[Path]:
    """See `create_run_directory`; returns the directories that were made."""
    if not path.exists():
        return make_directory(path)
    if require_free(path, overwrite):
        with locked(path):
            remove_entries(path)
    return []


def require_free(path: Path, overwrite: bool = False) -> bool:
    """RayflError unless `create_run_directory` can make `path` a run's; returns whether an earlier run is in it."""
    if not path.exists():
        return False
    if not path.is_dir():
        raise RayflError(f"{path} is a file: name a directory for the run")
    # A lock file that nobody holds does not count.
    found = [entry.name for entry in path.iterdir() if entry.name != "lock"]
    if found and not overwrite:
        raise RayflError(f"{path} is not empty: name another directory, or give --overwrite")
    if found and "experiment.json" not in found:
        raise RayflError(
            f"{path} holds something other than a run, which --overwrite does not delete: name another directory"
        )
    if found:
        require_own_entries(path)
    return bool(found)


def describe_run(
    directory: Path, experiment: Mapping[str, object], platform: Mapping[str, object] | None, toml: str
) -> None:
    """Write the resolved experiment (as JSON and as the TOML text that gives it), and the platform, unless it is None,
    as nobody knows it before there are actors.

    OSError where the disk refuses.
    """
    write_text(directory / "experiment.toml", toml)
    if platform is not None:
        write_platform(directory, platform)
    write_json(directory / "experiment.json", experiment)


def write_platform(directory: Path, platform: Mapping[str, object]) -> None:
    """Write what the machines that compute a run are. OSError where the disk refuses."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "platform.json", platform)


def read_platform(directory: Path) -> Mapping[str, object]:
    """What `write_platform` wrote; empty where nothing was computed yet. RayflError where it cannot be read."""
    path = directory / "platform.json"
    return _read_json(path) if path.exists() or (directory / "records").exists() else {}


def read_run(directory: Path, leave_out: Collection[str] = ()) -> Run:
    """Read a run that is finished, running or was cut (then what is readable). RayflError if it is no run.

    `leave_out`: tables that are not read, and empty; that of the clients can be long.
    """
    if not (directory / "experiment.json").is_file():
        raise RayflError(
            f"{directory} is no run directory (it has no experiment.json): name the directory that a run made"
        )
    tables = {
        name: schema.empty_table() if name in leave_out else read_table(directory, name)
        for name, schema in SCHEMAS.items()
    }
    return Run(
        directory=directory,
        experiment=_read_json(directory / "experiment.json"),
        platform=read_platform(directory),
        finished=all(table_path(directory, name, "parquet").exists() for name in SCHEMAS),
        **tables,
    )


def run_directories(directory: Path) -> list[Path]:
    """The runs inside a sweep's directory, by name; of any other directory, itself."""
    if (directory / "experiment.json").is_file() or not directory.is_dir():
        return [directory]
    return sorted(path.parent for path in directory.glob("*/experiment.json")) or [directory]


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        return json_files.read_table(path)
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise RayflError(f"{path} cannot be read ({why}): restore it, or run the experiment again") from None


def save_model(directory: Path, name: str, parts: Iterable[Mapping[str, "Tensor"]]) -> list[Path]:
    """Write a tree of tensors, which comes in parts of different keys, to models/<name>.safetensors; returns the paths.

    What is larger than `MODEL_BYTES` goes to models/<name>-0000.safetensors, -0001 and so on, whole parts to each, so
    that no more of it is in memory at once. DiskError where the disk refuses.
    """
    with writing(directory, f"go on with: rayfl resume {directory}"), safetensors_errors():
        folder = directory / "models"
        folder.mkdir(parents=True, exist_ok=True)
        earlier = {*model_files(directory, name), folder / f"{name}.safetensors"}
        paths: list[Path] = []
        for shard, is_all in _shards(parts):
            path = folder / (f"{name}.safetensors" if is_all else f"{name}-{len(paths):04d}.safetensors")
            _save_tensors(path, shard)
            paths.append(path)
        for path in earlier - set(paths):
            path.unlink(missing_ok=True)
    return paths


def _shards(parts: Iterable[Mapping[str, "Tensor"]]) -> Iterator[tuple[dict[str, "Tensor"], bool]]:
    """Parts put together until they are larger than `MODEL_BYTES`, and whether that is all of them."""
    shard: dict[str, Tensor] = {}
    first, size = True, 0
    for part in parts:
        if size > MODEL_BYTES:
            yield shard, False
            shard, first, size = {}, False, 0
        shard.update(part)
        size += sum(tensor.nbytes for tensor in part.values())
    yield shard, first


def _save_tensors(path: Path, tensors: Mapping[str, "Tensor"]) -> None:
    import torch
    from safetensors.torch import save_file

    # Clones, because safetensors refuses tensors that share memory.
    own = {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    write_whole(path, lambda partial: save_file(own, partial))


def model_files(directory: Path, name: str) -> list[Path]:
    """The files of the models that `save_model` wrote under `name`, in their order; empty where there is none."""
    whole = directory / "models" / f"{name}.safetensors"
    shards = sorted(
        whole.parent.glob(f"{name}-[0-9][0-9][0-9][0-9]*.safetensors"), key=lambda path: (len(path.name), path.name)
    )
    return [whole] if whole.is_file() else shards


def model_keys(directory: Path, name: str) -> list[str]:
    """The keys of the tree that `save_model` wrote under `name`. RayflError if there is none."""
    return [key for keys in _read_models(directory, name, lambda file: list(file.keys())) for key in keys]


def load_model(directory: Path, name: str, prefix: str = "") -> dict[str, "Tensor"]:
    """The tree that `save_model` wrote under `name`; of that only what begins with `prefix`. RayflError if there is
    none."""

    # Any: safetensors' reader has no public type.
    def chosen(file: Any) -> dict[str, "Tensor"]:
        return {key: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118

    return {key: tensor for found in _read_models(directory, name, chosen) for key, tensor in found.items()}


# Any: safetensors' reader, and what is read.
def _read_models(directory: Path, name: str, read: Callable[[Any], Any]) -> Iterator[Any]:
    """What `read` finds in each file under `name`. RayflError where there is none, or one is damaged."""
    paths = model_files(directory, name)
    if not paths:
        path = directory / "models" / f"{name}.safetensors"
        raise RayflError(f"{path} does not exist: the run has saved no model of that name")
    for path in paths:
        try:
            require_regular(path)
            with safe_open(path, "pt") as file:
                found = read(file)
        except (OSError, SafetensorError) as error:
            raise RayflError(f"{path} cannot be read ({error}): restore it, or run the experiment again") from None
        yield found
