"""Print the requirements, each with the hash of its file, of an installation that pip reports on the standard input.

k8s/README.md has the command. The package itself, which pip builds from a folder, is left out.
"""

import json
import sys


def main() -> None:
    """Read the report of `pip install --dry-run --report -`, and print a line per package."""
    for one in json.load(sys.stdin)["install"]:
        if "archive_info" in one["download_info"]:
            name, version = one["metadata"]["name"], one["metadata"]["version"]
            digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
            sys.stdout.write(f"{name}=={version} --hash=sha256:{digest}\n")


if __name__ == "__main__":
    main()
