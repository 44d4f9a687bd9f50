"""``scripts/api-key``: make an API key, show it once, and keep its hash in the file of keys."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from server.access import ApiKeyFileError, add_api_key, num_api_keys


def main(
    name: Annotated[str, typer.Argument(help="Who is to hold the key.")],
    file: Annotated[Path, typer.Argument(help="The file of --api-key-file; made if need be.")],
) -> None:
    """Print a new API key, and add its hash to a file. The key itself is kept nowhere.

    A name may have several keys: so one can take the place of another without a moment between.
    """
    try:
        num_before = num_api_keys(file, name)
        print(add_api_key(file, name))
    except ApiKeyFileError as error:
        raise SystemExit(f"api-key: {error}") from error
    if num_before:
        print(
            f"api-key: {name} has {num_before + 1} keys now; to end an old one, delete its line in "
            f"{file}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    typer.run(main)
