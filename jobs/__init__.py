"""Entry points: parse, build, call, print. Importing this package prepares the process before torch is loaded."""

import warnings

from rayfl.determinism.process import prepare_process

prepare_process()
# Ray imports tqdm.auto, which warns in a notebook without ipywidgets. The bars of tqdm work without ipywidgets.
warnings.filterwarnings("ignore", "IProgress not found")
