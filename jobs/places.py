"""Where a run lies: a directory of this machine, and its copy in object storage, if `output.directory` is there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path

from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.identity import determining_settings
from rayfl.run_directory.mirror import Copies, bring, copies_for_listing, copy_for_reading, require_writable
from rayfl.run_directory.object_storage import Storage, StorageError, below, is_url, parted
from rayfl.run_directory.record import read_run

HERE = Path("runs")
"""Where the local side of runs lies whose copies are elsewhere."""
Place = Path | str
"""A directory of this machine, or the URL of a run in object storage."""
_LOG = getLogger("rayfl.jobs")


def local_folder(experiment: Experiment) -> Path:
    """The folder of this machine in which an experiment's run directories are made."""
    return HERE if is_url(experiment.output.directory) else Path(experiment.output.directory)


def copy_of(directory: Path, folder: str) -> str | None:
    """The URL of the copy of the run in `directory`, where `folder`, its `output.directory`, is a URL; else None."""
    return below(folder, directory.name) if is_url(folder) else None


def placed(place: Place, experiment: Experiment) -> tuple[Path, Experiment]:
    """The local directory of a run that was asked for in `place`, and the experiment, which names the copy's folder."""
    if not isinstance(place, str):
        return place.absolute(), experiment
    folder, name = parted(place)
    output = experiment.output.model_copy(update={"directory": folder})
    return (HERE / name).absolute(), experiment.model_copy(update={"output": output})


def require_free_copy(url: str | None, overwrite: bool) -> None:
    """RayflError unless the copy of a new run can be written to `url`, and only `overwrite` replaces a run there."""
    if url is None:
        return
    with _readable(url):
        storage = Storage(url)
        require_writable(storage)
        if not overwrite and storage.has("experiment.json"):
            raise RayflError(
                f"{url} holds a run: go on with it by rayfl resume, name another place, or give --overwrite"
            )


def has_copy(directory: Path, folder: str) -> bool:
    """Whether anything lies where the copy of the run in `directory` would go. RayflError if that cannot be read."""
    url = copy_of(directory, folder)
    if url is None:
        return False
    with _readable(url):
        return bool(Storage(url).files())


def clear_copy(url: str | None) -> None:
    """Remove the run that a new one replaces. RayflError where that is not allowed."""
    if url is not None:
        with _readable(url):
            Copies(Path(), Storage(url)).clear()


@contextmanager
def _readable(url: str) -> Iterator[None]:
    """What a storage refuses before the run is the user's to put right: a RayflError."""
    try:
        yield
    except StorageError as error:
        raise RayflError(
            f"{url} cannot be read ({error}): look at the address and the account, or name another place"
        ) from None


def brought(url: str) -> Path:
    """The local directory of the run at `url`, which is fetched where the copy has come further.

    RayflError where there is no run, or another one in that directory.
    """
    directory = (HERE / parted(url)[1]).absolute()
    fetch_newer(url, directory)
    if not (directory / "experiment.json").is_file():
        raise RayflError(f"{url} is no run (it has no experiment.json): name the folder that a run made")
    return directory


def fetch_newer(url: str, directory: Path) -> None:
    """Fetch the run at `url` where it has come further than the one in `directory`. RayflError as of `bring`."""
    with _readable(url):
        fetched = bring(Storage(url), directory, _require_same)
    if fetched:
        _LOG.info("%s has come further, and was fetched into %s", url, directory)


def _require_same(here: Path, there: Path) -> None:
    """RayflError where two directories hold runs of different settings or seeds."""
    if _numbers(read_run(here).experiment) != _numbers(read_run(there).experiment):
        raise RayflError(f"{here} holds another run than its place in the storage: move it away, or name another place")


def _numbers(experiment: Mapping[str, object]) -> Mapping[str, object]:
    """What decides a run's numbers, but how many rounds there are of them."""
    return {**determining_settings(experiment), "seed": experiment.get("seed"), "rounds": None}


def lacks_copy(directory: Path, folder: str) -> str | None:
    """The URL of the copy of a run in `directory` where that is not all there; else None.

    RayflError where the storage cannot be read.
    """
    url = copy_of(directory, folder)
    if url is None:
        return None
    with _readable(url):
        return url if Copies(directory, Storage(url)).is_behind() else None


def to_list(url: str) -> Path:
    """A folder in which the runs below `url` can be listed."""
    with _readable(url):
        return copies_for_listing(url)


def to_read(url: str) -> Path:
    """A directory in which the run at `url` can be read, without what a report does not need."""
    with _readable(url):
        return copy_for_reading(url, ("checkpoints/", "models/global", "tensorboard/", "mlflow/", "wandb/"))
