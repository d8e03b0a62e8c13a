"""The secret that all processes of a cluster share. It lives in private files and memory: no argv, no log."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cluster.errors import ConfigError

TOKEN_VARIABLE: Final = "BATON_CLUSTER_TOKEN"
MIN_TOKEN_CHARS: Final = 16
MAX_TOKEN_FILE_BYTES: Final = 4096  # another file given by mistake is not read to its end


def resolve_cluster_token(
    token_file: str | None, environment: Mapping[str, str], generated_file: Path | None
) -> str:
    """From `token_file`, else `BATON_CLUSTER_TOKEN`, else a new one, left in `generated_file` (mode 0600).

    Raises:
        ConfigError: the file cannot be read or is too long, the token is too short, or there is none and
            `generated_file` is None: others could not know a new one. Never names the token.
    """
    if token_file is not None:
        try:
            with Path(token_file).expanduser().open("rb") as file:
                content = file.read(MAX_TOKEN_FILE_BYTES + 1)
            token = content.decode().strip()
        except OSError as error:
            raise ConfigError(f"cannot read the cluster token file {token_file}: {error}") from error
        except UnicodeDecodeError as error:  # its own words would show a byte of what may be a secret
            raise ConfigError(f"the cluster token file {token_file} is not text in UTF-8") from error
        if len(content) > MAX_TOKEN_FILE_BYTES:
            raise ConfigError(
                f"the cluster token file {token_file} is longer than {MAX_TOKEN_FILE_BYTES} bytes: "
                "is it another file?"
            )
        origin = token_file
    elif environment.get(TOKEN_VARIABLE):
        token, origin = environment[TOKEN_VARIABLE].strip(), f"environment {TOKEN_VARIABLE}"
    elif generated_file is None:
        raise ConfigError(
            "no cluster token: give all processes of the cluster the same --cluster-token-file, or "
            f"{TOKEN_VARIABLE} in the environment"
        )
    else:
        token = secrets.token_hex(32)
        write_private(generated_file, token.encode())
        return token
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(f"the cluster token from {origin} is shorter than {MIN_TOKEN_CHARS} characters")
    return token


def exposure(token_file: str) -> str | None:
    """What to tell a person whose token file others can read or replace; None if only its owner can."""
    try:
        status = Path(token_file).expanduser().stat()
    except OSError:
        return None  # `resolve_cluster_token` names it
    mode = stat.S_IMODE(status.st_mode)
    if not mode & 0o077 and status.st_uid == os.getuid():
        return None
    return (
        f"the cluster token file {token_file} has mode {mode:04o} and can be read or changed by others: "
        f"`chmod 600 {token_file}`"
    )


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read.

    Raises:
        OSError: it exists already, or cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
