"""Entry points: parse, build, call, print. Importing this package prepares the process before torch is loaded."""

import warnings

from rayfl.determinism.process import prepare_process

prepare_process()
# Ray imports tqdm.auto, which warns in a notebook without ipywidgets. rayfl needs neither.
warnings.filterwarnings("ignore", "IProgress not found")
