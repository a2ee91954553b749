"""The image: what its steps are, and that they work, as far as they need no Docker."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rayfl
from tests.k8s.image import ROOT, WORKDIR, instructions, stages
from tests.refusals import check_sentence

BUILD, FINAL = range(2)


def shell(command: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=120,
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


def installed(folder: Path, **arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the Dockerfile's installation, with a function in the place of pip that prints its arguments."""
    (install,) = instructions("RUN", BUILD)
    pip = 'pip() { echo "$PIP_EXTRA_INDEX_URL" "$@"; }'
    return shell(f"{pip}; {install}", folder, **{"CPU_INDEX": "there", "HASHES": "yes", **arguments})


HASHED = "install --require-hashes --no-deps -r k8s/requirements"
OURS = ["install --no-deps --no-index --no-build-isolation -e .", "check"]


@pytest.mark.parametrize(
    ("hashes", "variant", "index", "calls"),
    [
        ("yes", "cpu", "there", [f"{HASHED}.txt", "install --no-deps -c constraints.txt torch torchvision", *OURS]),
        ("yes", "cuda", "", [f"{HASHED}.txt", f"{HASHED}-cuda.txt", *OURS]),
        ("no", "cpu", "there", ["install -c constraints.txt -e .", "check"]),
        ("no", "cuda", "", ["install -c constraints.txt -e .", "check"]),
    ],
)
def test_the_variant_chooses_torchs_build(hashes: str, variant: str, index: str, calls: list[str]) -> None:
    assert not list((ROOT / "k8s").glob("requirements-cpu.txt"))
    done = installed(ROOT, VARIANT=variant, HASHES=hashes)
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"{index} {call}" for call in calls])


def test_another_variant_is_refused(tmp_path: Path) -> None:
    done = installed(tmp_path, VARIANT="tpu")
    assert done.returncode == 1
    check_sentence(done.stderr.removesuffix("\n"), ["VARIANT=tpu", "cpu", "cuda"])


def test_generated_hashes_are_required(tmp_path: Path) -> None:
    def reported(name: str, version: str, digest: str) -> dict[str, Any]:
        archive = {"archive_info": {"hashes": {"sha256": digest}}}
        return {"metadata": {"name": name, "version": version}, "download_info": archive}

    report = {
        "install": [
            {"metadata": {"name": "rayfl", "version": "0.1.0"}, "download_info": {"dir_info": {}}},
            reported("torch", "2.13.0+cpu", "0a1b"),
            reported("typing_extensions", "4.16.0", "2c3d"),
        ]
    }
    (folder := tmp_path / "k8s").mkdir()
    command = [sys.executable, shutil.copy(ROOT / "k8s" / "hashes.py", folder), "cpu"]
    subprocess.run(command, input=json.dumps(report), text=True, check=True, timeout=60)
    assert (folder / "requirements.txt").read_text() == "typing-extensions==4.16.0 --hash=sha256:2c3d\n"
    assert (folder / "requirements-cpu.txt").read_text() == "torch==2.13.0+cpu --hash=sha256:0a1b\n"
    done = installed(tmp_path, VARIANT="cpu")
    assert done.stdout.splitlines() == [f"there {call}" for call in (f"{HASHED}.txt", f"{HASHED}-cpu.txt", *OURS)]


def locked(name: str) -> dict[str, str]:
    """The versions in a file of hashes, by name. Every line must be a version and one hash."""
    lines = (ROOT / "k8s" / name).read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert lines and None not in found, [line for line, one in zip(lines, found, strict=True) if not one]
    return {one[1]: one[2] for one in found if one}


def test_the_hashed_versions_are_those_of_constraints_txt() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = {name: version for name, is_pin, version in (line.partition("==") for line in lines) if is_pin}
    shared, cuda = locked("requirements.txt"), locked("requirements-cuda.txt")
    assert not shared.keys() & cuda.keys() and {"torch", "torchvision"} <= cuda.keys()
    for name, version in {**shared, **cuda}.items():
        # torch itself pins CUDA's libraries; `editables` is only for the installation of the package.
        of_build = name == "editables" or re.fullmatch("triton|cuda-toolkit|nvidia-.*", name)
        assert constraints.get(name, version if of_build else None) == version, name


def test_all_that_rayfl_needs_has_a_hash() -> None:
    versions = {**locked("requirements-cuda.txt"), **locked("requirements.txt")}
    image = {"python_version": "3.11", "python_full_version": "3.11.14", "sys_platform": "linux"}
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [Requirement(line) for line in [*table["project"]["dependencies"], "hatchling", "editables"]]
    seen = set()
    while wanted:
        needed = wanted.pop()
        name = canonicalize_name(needed.name)
        assert needed.specifier.contains(versions[name], prereleases=True), needed
        for extra in {"", *needed.extras}:
            # Not installed here; it needs nothing.
            if (name, extra) not in seen and name != "editables":
                lines = [Requirement(line) for line in requires(name) or ()]
                wanted += [one for one in lines if not one.marker or one.marker.evaluate({**image, "extra": extra})]
            seen.add((name, extra))


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
