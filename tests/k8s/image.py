"""What the Dockerfile says, by instruction."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage with their arguments, continued lines joined; what precedes the first FROM is in
    front of it."""
    text = (ROOT / "k8s" / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found: list[list[tuple[str, str]]] = [[]]
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if line:
            word, _, rest = line.partition(" ")
            if word == "FROM" and any(name == "FROM" for name, _ in found[-1]):
                found.append([])
            found[-1].append((word, rest))
    return found


def instructions(word: str, stage: int = -1) -> list[str]:
    """The arguments of an instruction in a stage, in order."""
    return [rest for name, rest in stages()[stage] if name == word]


(WORKDIR,) = instructions("WORKDIR")
