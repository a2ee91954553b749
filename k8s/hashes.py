"""Write the requirements of an installation that pip reports on the standard input, each with its file's hash.

k8s/README.md has the command. `requirements-VARIANT.txt` gets torch and what comes with one of its builds alone,
`requirements.txt` all others. The package itself, which pip builds from a folder, is left out.
"""

import json
import re
import sys
from pathlib import Path

OF_TORCH = re.compile(r"torch|torchvision|triton|cuda-.*|nvidia-.*")


def main() -> None:
    """Read the report of `pip install --dry-run --report -`, and write both files beside this one."""
    lines: dict[str, list[str]] = {"": [], f"-{sys.argv[1]}": []}
    for one in json.load(sys.stdin)["install"]:
        if "archive_info" in one["download_info"]:
            name, version = re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower(), one["metadata"]["version"]
            digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
            kind = f"-{sys.argv[1]}" if OF_TORCH.fullmatch(name) else ""
            lines[kind].append(f"{name}=={version} --hash=sha256:{digest}\n")
    for kind, found in lines.items():
        (Path(__file__).parent / f"requirements{kind}.txt").write_text("".join(sorted(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
