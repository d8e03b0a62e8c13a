"""Settings: precedence, origins, errors that name the setting and its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.cluster_token import resolve_cluster_token
from cluster.config import ClusterConfig, num_available_cores, threads_per_worker
from cluster.config_sources import describe, parse_size, resolve_config, setting_infos, shown_kv_bytes
from cluster.errors import ConfigError
from cluster.ids import Epoch, RouterId, WorkerId
from cluster.role_config import RouterConfig, WorkerConfig, dump_config, load_config
from cluster.wire.messages import Role

SECRET = "s3cret-" * 5
WORKER = WorkerConfig(
    cluster_token=SECRET,
    served_model_name="m",
    block_size=32,
    worker=WorkerId("decode-0"),
    role=Role.DECODE,
    epoch=Epoch(3),
    router_addresses=("unix:/a", "tcp:h:1"),
    model="demo",
    kv_address="unix:/b",
    runtime_dir="/tmp/baton-x",
)
ROUTER = RouterConfig(
    cluster_token=SECRET,
    served_model_name="m",
    block_size=32,
    router=RouterId("router-0"),
    model_dir="/m",
    host="h",
    port=1,
    control_address="unix:/a",
    num_prefill=1,
    num_decode=1,
)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "baton.yaml", "port: 1\ndtype: fp32\nmax-num-seqs: 7\n")
    resolved = resolve_config({"port": "3"}, {"BATON_PORT": "2", "BATON_DTYPE": "bf16", "HOME": "/x"}, file)
    config = resolved.config
    assert (config.port, config.dtype, config.max_num_seqs, config.decode) == (3, "bf16", 7, 1)
    assert resolved.origins == {
        "port": "--port",
        "dtype": "environment BATON_DTYPE",
        "max_num_seqs": str(file),
    }
    derived = {"port": "4", "admin_port": "5"}  # what was given is shown as it is
    lines = describe(config, resolved.origins, derived).splitlines()
    assert [line.split() for line in lines if line.startswith(("port ", "admin_port ", "decode "))] == [
        ["port", "=", "3", "(--port)"],
        ["admin_port", "=", "5", "(derived)"],
        ["decode", "=", "1", "(default)"],
    ]


def test_kv_memory_that_nobody_has_given_is_shown_as_it_will_be() -> None:
    def shown(**settings: Any) -> str:
        return shown_kv_bytes(ClusterConfig(**settings), Role.DECODE)

    assert shown() == shown(backend="reference") == str(512 << 20)
    assert shown(backend="triton", gpu_memory_share=0.5) == "0.5 of what a GPU has left"
    assert shown(backend="auto") == f"{512 << 20}, or 0.9 of what a GPU has left"


def test_toml_and_the_file_named_by_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path / "baton.toml", 'prefill = 2\ndecode_kv = "1GiB"\nlease_ttl_s = 5\n')
    config = resolve_config({}, {"BATON_CONFIG": str(file)}).config
    assert (config.prefill, config.decode_kv_bytes, config.lease_ttl_s) == (2, 1 << 30, 5.0)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert resolve_config({}, {}, write(tmp_path / "e.yaml", "")).config == ClusterConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", r"unknown key in .*: prot, did you mean port\?"),
        ("port: [1]", "--port: expected a whole number from 0 to 65535, got"),
        ("port: 1.5", "--port"),
        ("port: yes", "--port"),
        ("- 1", "must be a table"),
        ("a: b: c", "cannot parse"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_config({}, {}, write(tmp_path / "baton.yaml", text))


def test_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*No such file"):
        resolve_config({}, {}, tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot parse"):
        resolve_config({}, {}, write(tmp_path / "x.toml", "port = "))


def test_unknown_environment_variable_has_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"BATON_PROT, did you mean BATON_PORT\?"):
        resolve_config({}, {"BATON_PROT": "1"})


def test_variables_that_kubernetes_injects_for_a_service_called_baton_are_no_settings() -> None:
    injected = {
        "BATON_PORT": "tcp://10.0.0.1:8000",
        "BATON_SERVICE_HOST": "10.0.0.1",
        "BATON_SERVICE_PORT": "8000",
        "BATON_SERVICE_PORT_HTTP": "8000",
        "BATON_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "BATON_PORT_8000_TCP_ADDR": "10.0.0.1",
        "BATON_ROUTER_SERVICE_HOST": "10.0.0.2",
    }
    assert resolve_config({}, injected).config == ClusterConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "70000"),
        ("port", "-1"),
        ("port", "x"),
        ("port", ""),
        ("decode", "0"),
        ("dtype", "int8"),
        ("quantization", "int4"),
        ("kv_dtype", "fp8"),
        ("block_size", "7"),
        ("kv_edge", "carrier-pigeon"),
        ("prefill_kv_bytes", "12 parsecs"),
        ("prefill_kv_bytes", "0"),
        ("lease_ttl_s", "0"),
        ("lease_ttl_s", "nan"),
        ("threads_per_worker", "0"),
        ("max_model_len", "1e3x"),
    ],
)
def test_bad_values_name_the_flag_the_value_and_its_origin(name: str, value: str) -> None:
    flag = "--" + name.removesuffix("_bytes").replace("_", "-")
    with pytest.raises(ConfigError) as raised:
        resolve_config({name: value}, {})
    assert str(raised.value).startswith(f"{flag}: expected ")
    assert f"got `{value}` (from {flag})" in str(raised.value)


def test_a_quantization_that_does_not_exist_is_answered_with_the_choices() -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_config({}, {"BATON_QUANTIZATION": "q8_0"})
    assert str(raised.value) == (
        "--quantization: expected one of int8, int8-weights, none, got `q8_0` "
        "(from environment BATON_QUANTIZATION)"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("512M", 512 << 20),
        ("512MB", 512_000_000),
        ("1.5 GiB", 3 << 29),
        ("1024", 1024),
        ("2k", 2048),
        ("7 b", 7),
        ("", None),
        ("-1", None),
        ("1XB", None),
        ("MiB", None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


def test_every_setting_has_a_help_text_and_its_own_flag_and_variable() -> None:
    infos = setting_infos()
    assert len({info.flag for info in infos}) == len({info.variable for info in infos}) == len(infos)
    assert all(info.help and info.expected for info in infos)


@pytest.mark.parametrize("config", [WORKER, ROUTER], ids=["worker", "router"])
def test_role_configs_survive_json_and_hide_the_token(config: WorkerConfig | RouterConfig) -> None:
    assert load_config(dump_config(config)) == config
    assert config.token == SECRET.encode()
    for text in (repr(config), str(config), f"{config}", repr([config])):
        assert SECRET not in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epock": 1}, "epock"),
        ({"epoch": "x"}, "epoch"),
        ({"kind": "gateway"}, "gateway"),
        ({"model": None}, "model"),
    ],
)
def test_role_config_errors_name_the_field(change: dict[str, Any], named: str) -> None:
    fields = msgspec.json.decode(dump_config(WORKER)) | change
    with pytest.raises(ConfigError, match=named):
        load_config(msgspec.json.encode(fields))


@pytest.mark.parametrize(
    ("cores", "prefill", "decode", "asked", "expected"),
    [
        (2, 1, 1, None, 1),
        (1, 1, 1, None, 1),
        (8, 1, 1, None, 4),
        (8, 0, 1, None, 8),
        (2, 3, 3, None, 1),
        (2, 1, 1, 5, 5),
    ],
)
def test_threads_share_the_cores(
    cores: int, prefill: int, decode: int, asked: int | None, expected: int
) -> None:
    config = ClusterConfig(prefill=prefill, decode=decode, threads_per_worker=asked)
    assert threads_per_worker(config, cores) == expected


def test_a_container_quota_bounds_the_cores(tmp_path: Path) -> None:
    assert num_available_cores(write(tmp_path / "half", "50000 100000")) == 1
    unlimited = num_available_cores(write(tmp_path / "max", "max 100000"))
    assert unlimited == num_available_cores(tmp_path / "none")
    assert num_available_cores(write(tmp_path / "many", "9000000 100000")) == unlimited


def test_token_from_file_then_environment_then_generated(tmp_path: Path) -> None:
    file = write(tmp_path / "token", f"{SECRET}\n")
    generated = tmp_path / "generated"
    environment = {"BATON_CLUSTER_TOKEN": "e" * 20}
    assert resolve_cluster_token(str(file), environment, generated) == SECRET
    assert resolve_cluster_token(None, environment, generated) == "e" * 20
    assert not generated.exists()
    token = resolve_cluster_token(None, {}, generated)
    assert len(token) == 64
    assert generated.read_text() == token
    assert generated.stat().st_mode & 0o777 == 0o600


def test_bad_tokens_are_refused_without_being_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the cluster token file"):
        resolve_cluster_token(str(tmp_path / "none"), {}, tmp_path / "g")
    with pytest.raises(ConfigError, match="BATON_CLUSTER_TOKEN is shorter than 16") as raised:
        resolve_cluster_token(None, {"BATON_CLUSTER_TOKEN": "hunter2"}, tmp_path / "g")
    assert "hunter2" not in str(raised.value)
