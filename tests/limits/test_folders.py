"""Folders whose links lead in a circle: every walk ends."""

import os
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from rayfl.data.file_digest import content_digest
from rayfl.data.sources.image_folders import OwnImageFolder
from rayfl.limits.regular_files import files_below
from tests.jobs.commands import rayfl
from tests.refusals import refused


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of two classes, beside a folder that nobody may read through it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.png").write_bytes(b"mine")
    for name in ("cat/0.png", "cat/more/1.png", "dog/0.png", "dog/1.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        matplotlib.image.imsave(path, np.full((4, 4, 3), 7, np.uint8))
    return tmp_path / "photos"


def test_files_come_by_name_those_of_a_folder_before_those_of_its_folders(photos: Path):
    (photos / "cat" / "z.png").symlink_to(photos / "dog" / "0.png")
    (photos / "dog" / "also").symlink_to(photos / "cat")
    found = [path.relative_to(photos).as_posix() for path in files_below(photos)]
    cats = ["0.png", "z.png", "more/1.png"]
    assert found == [*(f"cat/{name}" for name in cats), "dog/0.png", "dog/1.png", *(f"dog/also/{one}" for one in cats)]


LOOPS = {
    "itself": ("cat/up", "."),
    "parent": ("cat/up", ".."),
    "above the data": ("cat/more/up", "../../.."),
    "root": ("cat/up", "/"),
    "class": ("up", "."),
    "class above": ("up", ".."),
}


@pytest.mark.parametrize(("name", "target"), LOOPS.values(), ids=LOOPS)
def test_a_link_to_a_folder_around_it_gets_a_sentence(
    photos: Path, name: str, target: str, monkeypatch: pytest.MonkeyPatch
):
    before = content_digest(photos)
    (photos / name).symlink_to(target)
    names = [photos / name, os.path.realpath(photos / name), "link"]
    with refused(names=names):
        list(files_below(photos))
    with refused(names=names):
        OwnImageFolder(path=str(photos)).load()
    assert content_digest(photos) == before
    monkeypatch.chdir(photos.parent)
    Path("own.toml").write_text(
        "rounds = 1\ndata = {name = 'image-folder', path = 'photos'}\npartition = 'iid'\nclients = {count = 1}\n"
        "model = 'logistic'\nmethod = {name = 'fedavg', lr = 0.1}\n"
    )
    for command in (["run", "own.toml", "--dry-run"], ["run", "own.toml", "--inline"], ["data", "own.toml"]):
        refused(rayfl(*command), names=[Path("photos", name), *names[1:]])
    assert not Path("runs").exists()


@pytest.mark.parametrize("split", ["train", "test"])
def test_also_one_that_stands_for_an_owner_or_a_split(photos: Path, split: str):
    (photos / "dog" / "up").symlink_to("../..")
    with refused(names=[photos / "dog" / "up"]):
        OwnImageFolder(path=str(photos), owners="folder").load()
    whole = photos.parent / "splits"
    whole.mkdir()
    for name in ("train", "test"):
        if name == split:
            (whole / name).symlink_to(".")
        else:
            (whole / name).mkdir()
            (whole / name / "cat").symlink_to(photos / "cat")
    with refused(names=[whole / split]):
        OwnImageFolder(path=str(whole)).load()


def test_two_links_that_lead_to_each_other_end(photos: Path):
    before = content_digest(photos)
    (photos / "cat" / "dogs").symlink_to("../dog")
    (photos / "dog" / "cats").symlink_to("../cat")
    with refused(names=[photos / "cat/dogs/cats"]):
        list(files_below(photos))
    with refused(names=["dogs/cats"]):
        OwnImageFolder(path=str(photos)).load()
    assert content_digest(photos) != before


def test_a_folder_counts_under_each_of_its_names(photos: Path):
    # Two classes that share their images, and one of them given another name: other labels, another digest.
    (photos / "pet").symlink_to("cat")
    before = content_digest(photos)
    (photos / "pet").unlink()
    (photos / "pet").symlink_to("dog")
    assert content_digest(photos) != before
    assert OwnImageFolder(path=str(photos), test_share=0.5).load().num_classes == 3
