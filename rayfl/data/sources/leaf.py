"""The JSON files of LEAF: users, num_samples, and for each user its x and y.

Caldas et al.: LEAF, a benchmark for federated settings (2018); https://github.com/TalwalkarLab/leaf.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rayfl.errors import RayflError, reason
from rayfl.limits.regular_files import read_bytes


class User(NamedTuple):
    """One user's samples as JSON has them: x and y are lists of the same length."""

    name: str
    x: list[Any]
    y: list[Any]
    path: Path


def has_leaf(folder: Path) -> bool:
    """Whether `folder` holds the files of LEAF's preprocess.sh: train/*.json and test/*.json."""
    return all(any((folder / split).glob("*.json")) for split in ("train", "test"))


def leaf_files(folder: Path) -> list[Path]:
    """All JSON files of both splits."""
    return [path for split in ("train", "test") for path in sorted((folder / split).glob("*.json"))]


def read_leaf(folder: Path) -> Iterator[User]:
    """All users in the JSON files of `folder`, file after file by name; only one file is in memory at a time.

    RayflError if a file is not LEAF's or lacks samples that it announces.
    """
    for path in sorted(folder.glob("*.json")):
        yield from _users(path)


def _users(path: Path) -> Iterator[User]:
    try:
        content = json.loads(read_bytes(path))
        for name, announced in zip(content["users"], content["num_samples"], strict=True):
            user = User(name, content["user_data"][name]["x"], content["user_data"][name]["y"], path)
            if not len(user.x) == len(user.y) == announced:
                raise RayflError(
                    f"{path}: user {name!r} has {len(user.x)} x and {len(user.y)} y where num_samples says "
                    f"{announced}: fetch or make the file again"
                )
            yield user
    except RayflError:
        raise
    except OSError as error:
        raise RayflError(f"{path} cannot be read ({reason(error)}): fetch or make it again") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RayflError(
            f"{path} is not a JSON file of LEAF with users, num_samples and user_data ({_fault(error)}): fetch or make "
            "it again"
        ) from None


def _fault(error: Exception) -> str:
    """The cause of an exception, in words."""
    if isinstance(error, RecursionError):
        return "its lists are nested too deep"
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno} is no JSON"
    if isinstance(error, UnicodeDecodeError):
        return "it is no UTF-8 text"
    return "its parts are not lists, or their lengths differ"
