"""The shared secret: where it comes from, who may read it, and that it never shows."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cluster.cluster_token import TOKEN_VARIABLE, exposure, resolve_cluster_token
from cluster.errors import ConfigError
from cluster.ids import RouterId
from cluster.role_config import RouterConfig, load_config

SECRET = "s3cret-s3cret-s3cret"


def test_file_beats_environment_beats_a_new_one(tmp_path: Path) -> None:
    file, generated = tmp_path / "token", tmp_path / "generated"
    file.write_text(f"{SECRET}\n")
    environment = {TOKEN_VARIABLE: "environment-token-1"}
    assert resolve_cluster_token(str(file), environment, generated) == SECRET
    assert resolve_cluster_token(None, environment, generated) == "environment-token-1"
    assert not generated.exists()
    new = resolve_cluster_token(None, {}, generated)
    assert len(new) == 64
    assert generated.read_text() == new
    assert stat.S_IMODE(generated.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"short", b"", b"\xff\xfe" * 20, None])
def test_a_token_that_cannot_be_used_is_one_sentence_without_it(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="token") as caught:
        resolve_cluster_token(str(file), {}, tmp_path / "generated")
    assert "short" not in str(caught.value).replace("shorter", "")


@pytest.mark.parametrize("content", [b"x" * 4097, None])
def test_another_file_given_by_mistake_is_not_read_to_its_end(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is None:
        file.symlink_to("/dev/zero")
    else:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="longer than 4096 bytes"):
        resolve_cluster_token(str(file), {}, None)


@pytest.mark.parametrize(
    ("mode", "told"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True), (0o620, True)]
)
def test_a_token_file_that_others_can_read_or_change_is_told(tmp_path: Path, mode: int, told: bool) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(mode)
    warning = exposure(str(file))
    assert (warning is not None) is told
    if warning is not None:
        assert f"{mode:04o}" in warning
        assert "chmod 600" in warning
        assert SECRET not in warning


def test_a_configuration_never_shows_its_token() -> None:
    config = RouterConfig(
        cluster_token=SECRET,
        served_model_name="m",
        block_size=16,
        router=RouterId("router-0"),
        model_dir="/m",
        host="127.0.0.1",
        port=1,
        control_address="unix:/x",
        num_prefill=1,
        num_decode=1,
    )
    assert SECRET not in f"{config} {config!r} {[config]}"
    with pytest.raises(ConfigError) as caught:
        load_config(b'{"kind": "router", "cluster_token": "' + SECRET.encode() + b'", "oops": 1}')
    assert SECRET not in str(caught.value)
