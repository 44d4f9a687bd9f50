"""``scripts/api-key``: make an API key, show it once, and keep its hash in the file of keys."""

from pathlib import Path
from typing import Annotated

import typer

from server.access import ApiKeyFileError, add_api_key


def main(
    name: Annotated[str, typer.Argument(help="Who is to hold the key.")],
    file: Annotated[Path, typer.Argument(help="The file of --api-key-file; made if need be.")],
) -> None:
    """Print a new API key, and add its hash to a file. The key itself is kept nowhere."""
    try:
        print(add_api_key(file, name))
    except ApiKeyFileError as error:
        raise SystemExit(f"api-key: {error}") from error


if __name__ == "__main__":
    typer.run(main)
