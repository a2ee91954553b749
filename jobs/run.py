"""Run one experiment: from Python (`run(Experiment(...))`), or as `python -m jobs.run FILE [key=value ...]`."""

from rayfl.process import settle

settle()

import shutil  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from actors import session  # noqa: E402
from jobs import console  # noqa: E402
from rayfl import machine  # noqa: E402
from rayfl.config import Experiment, to_toml  # noqa: E402
from rayfl.executor import InlineExecutor  # noqa: E402
from rayfl.play import play  # noqa: E402
from rayfl.prepare import prepare  # noqa: E402
from rayfl.record import create_run_directory, describe_run, read_run  # noqa: E402
from rayfl.report import report, summary  # noqa: E402
