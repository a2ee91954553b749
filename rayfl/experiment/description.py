"""What a run directory says of its run: the experiment, the files that it names, and the machines that compute it."""

from pathlib import Path

from rayfl.determinism.platform import Platform
from rayfl.experiment import toml
from rayfl.experiment.input_files import KeptFiles
from rayfl.run_directory.record import describe_run, locked


def write_description(directory: Path, files: KeptFiles, platform: Platform | None) -> None:
    """Write all of it; `platform` is None where it is not known yet. OSError where the disk refuses.

    RayflError where another process writes to the directory.
    """
    with locked(directory):
        files.write(directory)
        describe_run(directory, files.table, platform, toml.dumps(files.table))
