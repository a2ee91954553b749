"""The image: what its steps are, and that they work, as far as they need no Docker."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rayfl
from tests.k8s.image import ROOT, WORKDIR, instructions, stages
from tests.refusals import check_sentence

BUILD, FINAL = range(2)


def shell(command: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def program(path: Path, command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)


def copy(folder: Path, stage: int) -> None:
    """Do what COPY does with the build's context, which .dockerignore limits."""
    seen = {line.removeprefix("!") for line in ignored() if line.startswith("!")}
    for line in instructions("COPY", stage):
        if line.startswith("--from"):
            continue
        *sources, target = line.split()
        # A pattern may match nothing beside the file that is always there.
        for source in (one for one in sources if "*" not in one):
            assert source.partition("/")[0] in seen, f".dockerignore hides {source}"
            place = folder / target / Path(source).name if target.endswith("/") else folder / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)


def ignored() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_both_stages_begin_with_the_base_that_is_pinned_by_its_digest() -> None:
    (base,) = [rest for rest in instructions("ARG", BUILD) if rest.startswith("BASE=")]
    assert re.fullmatch(r"BASE=python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert [instructions("FROM", stage) for stage in (BUILD, FINAL)] == [["${BASE} AS build"], ["${BASE}"]]
    assert len(stages()) == 2


def test_the_context_is_what_the_image_copies_and_no_more() -> None:
    first, *rest = ignored()
    assert first == "*"
    wanted = {line for stage in (BUILD, FINAL) for line in instructions("COPY", stage) if "--from" not in line}
    sources = {source.partition("/")[0] for line in wanted for source in line.split()[:-1]}
    assert {line for line in rest if line.startswith("!")} == {f"!{source}" for source in sources}


def test_the_readme_builds_what_the_dockerfile_says() -> None:
    for path in ("Dockerfile", "README.md"):
        text = (ROOT / "k8s" / path).read_text(encoding="utf-8")
        assert f"docker build -f k8s/Dockerfile -t rayfl:{rayfl.__version__} ." in text
        assert f"docker build -f k8s/Dockerfile --build-arg VARIANT=cuda -t rayfl:{rayfl.__version__}-cuda ." in text


@pytest.mark.parametrize(("variant", "index"), [("cpu", "there"), ("cuda", ""), ("tpu", None)])
def test_the_variant_chooses_torchs_build(variant: str, index: str | None, tmp_path: Path) -> None:
    (install,) = instructions("RUN", BUILD)
    # In the place of pip, which would download torch, a function that says what it was given.
    pip = 'pip() { echo "index=$PIP_EXTRA_INDEX_URL" "$@"; }'
    done = shell(f"{pip}; {install}", tmp_path, VARIANT=variant, CPU_INDEX="there")
    if index is None:
        assert done.returncode == 1
        check_sentence(done.stderr.removesuffix("\n"), ["VARIANT=tpu", "cpu", "cuda"])
    else:
        assert (done.returncode, done.stdout) == (0, f"index={index} install -c constraints.txt -e .\n")


def test_hashes_once_generated_are_required(tmp_path: Path) -> None:
    report = {
        "install": [
            {"metadata": {"name": "rayfl", "version": "0.1.0"}, "download_info": {"dir_info": {}}},
            {
                "metadata": {"name": "torch", "version": "2.13.0+cpu"},
                "download_info": {"archive_info": {"hashes": {"sha256": "0a1b"}}},
            },
        ]
    }
    (folder := tmp_path / "k8s").mkdir()
    command = [sys.executable, str(ROOT / "k8s" / "hashes.py")]
    done = subprocess.run(command, input=json.dumps(report), capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "torch==2.13.0+cpu --hash=sha256:0a1b\n"
    (folder / "requirements-cpu.txt").write_text(done.stdout)
    (install,) = instructions("RUN", BUILD)
    told = shell(f'pip() {{ echo "$@"; }}; {install}', tmp_path, VARIANT="cpu", CPU_INDEX="there")
    required = "install --require-hashes --no-deps -r k8s/requirements-cpu.txt"
    assert told.stdout.splitlines() == [required, "install --no-deps --no-index --no-build-isolation -e ."]
    # A hash of one variant says nothing of the other.
    other = shell(f'pip() {{ echo "$@"; }}; {install}', tmp_path, VARIANT="cuda", CPU_INDEX="there")
    assert other.stdout == "install -c constraints.txt -e .\n"


def test_the_steps_run_outside_docker(tmp_path: Path) -> None:
    # All but apt-get and pip: what they install, the Python of this test has.
    home, tools = tmp_path / "srv", tmp_path / "tools"
    for folder in (home, tools):
        folder.mkdir()
    program(tools / "python", sys.executable)
    copy(home, BUILD)
    # pip needs the metadata, and those need files.
    metadata = shell("python -m hatchling metadata", home, PATH=str(tools))
    assert metadata.returncode == 0, metadata.stderr
    module, _, function = json.loads(metadata.stdout)["scripts"]["rayfl"].partition(":")

    copy(home, FINAL)
    *_, compile_all, check = instructions("RUN", FINAL)
    # Only what is on this PATH counts as there, such as a compiler.
    compiled = shell(compile_all, home, PATH=str(tools))
    assert compiled.returncode == 0, compiled.stderr
    assert any((home / "rayfl" / "__pycache__").iterdir())
    program(tools / "gcc", "true")
    assert shell(compile_all, home, PATH=str(tools)).returncode == 1

    # In the place of the script that pip writes.
    (tools / "rayfl").write_text(f"#!{sys.executable}\nfrom {module} import {function} as main\nmain()\n")
    (tools / "rayfl").chmod(0o755)
    told = shell(check, home, PATH=str(tools), HOME=str(tmp_path), PYTHONPATH=str(home))
    assert (told.returncode, told.stdout) == (0, f"rayfl, version {rayfl.__version__}\n"), told.stderr


def test_nobody_is_root_and_the_command_is_there() -> None:
    final = [word for word, _ in stages()[FINAL]]
    assert instructions("USER", FINAL) == ["1000:1000"]
    assert final[final.index("USER") + 1 :] == ["ENV", "RUN", "CMD"]
    assert instructions("RUN", FINAL)[-1] == "rayfl --version"
    assert (ROOT / "jobs/experiments/demo.toml").is_file() and WORKDIR == "/srv/rayfl"
