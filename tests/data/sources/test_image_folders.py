import os
from pathlib import Path

import pytest
from PIL import EpsImagePlugin

from rayfl.data.sources.image_folders import OwnImageFolder
from tests.refusals import refused

EPS = """%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 4 4
%%EndComments
showpage
%%EOF
"""


def test_no_program_is_started_for_postscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    programs, started = tmp_path / "programs", tmp_path / "started"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {started}\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "one.png").write_text(EPS)
    with refused(names=["one.png", "PNG"]):
        OwnImageFolder(path=str(tmp_path / "images")).load()
    assert not started.exists()
