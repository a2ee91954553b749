"""Entry points: parse, build, call, print. Importing them settles the process before torch is loaded."""

import warnings

from rayfl.determinism.process import prepare_process

prepare_process()
# Ray imports tqdm.auto, which warns in a notebook without ipywidgets. Its bars work without them.
warnings.filterwarnings("ignore", "IProgress not found")
