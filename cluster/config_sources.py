"""Where settings come from: flags > environment `BATON_*` > YAML/TOML file > defaults.

1. `setting_infos` reads the fields of `ClusterConfig`: one table behind flags, variables, file keys and help.
2. `resolve_config` takes each field from the first source that has it, checks it, and notes the origin.
3. `describe` shows the result.

A key that no field has is an error with a suggestion, in every source.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from cluster.cluster_token import TOKEN_VARIABLE
from cluster.config import DEFAULT_GPU_MEMORY_SHARE, DEFAULT_KV_BYTES, ClusterConfig
from cluster.errors import ConfigError
from cluster.request_config import RequestConfig
from cluster.wire.messages import Role

ENV_PREFIX: Final = "BATON_"
CONFIG_FILE_VARIABLE: Final = "BATON_CONFIG"
_OTHER_VARIABLES: Final = frozenset({CONFIG_FILE_VARIABLE, TOKEN_VARIABLE})

# Kubernetes injects these into every pod of a namespace that has a service called `baton`.
_SERVICE_LINK: Final = re.compile(
    r"BATON_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$"
)
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(b?|ib)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One field of `ClusterConfig` as the user meets it."""

    name: str
    flag: str
    variable: str
    help: str
    default: Any
    expected: str  # what a value must be, in words
    is_bytes: bool

    @property
    def help_with_default(self) -> str:
        if self.default is None:  # then the help says what it stands for
            return self.help
        size = self.default if self.is_bytes else 0
        in_bytes = f"{size >> 20}MiB" if size >= 1 << 20 else f"{size >> 10}KiB"
        return f"{self.help} (default: {in_bytes if self.is_bytes else self.default})"


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """`origins`: field → "--flag", "environment BATON_X" or "FILE"; fields at their default are absent."""

    config: ClusterConfig
    origins: Mapping[str, str]


def setting_infos() -> tuple[SettingInfo, ...]:
    """In the order in which they are shown: those of requests come last."""
    info = msgspec.inspect.type_info(ClusterConfig)
    assert isinstance(info, msgspec.inspect.StructType)
    num_of_requests = len(RequestConfig.__struct_fields__)  # a base's fields come first
    fields = (*info.fields[num_of_requests:], *info.fields[:num_of_requests])
    return tuple(map(_setting_info, fields))


def resolve_config(
    flags: Mapping[str, str], environment: Mapping[str, str], file: Path | None = None
) -> ResolvedConfig:
    """`flags` maps field names to what was typed; `file` defaults to `BATON_CONFIG`.

    Raises:
        ConfigError: an unknown key, a value that cannot be read, or a file that cannot.
    """
    infos = {info.name: info for info in setting_infos()}
    if file is None and environment.get(CONFIG_FILE_VARIABLE):
        file = Path(environment[CONFIG_FILE_VARIABLE])
    from_file = _from_file(file, infos) if file is not None else {}
    from_environment = _from_environment(environment, infos)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, info in infos.items():
        if name in flags:
            value, origin = flags[name], info.flag
        elif name in from_environment:
            value, origin = from_environment[name], f"environment {info.variable}"
        elif name in from_file:
            value, origin = from_file[name], str(file)
        else:
            continue
        values[name] = _convert(info, value, origin)
        origins[name] = origin
    return ResolvedConfig(ClusterConfig(**values), origins)


def shown_kv_bytes(config: ClusterConfig, role: Role) -> str:
    """KV memory of a worker where nobody has said how much."""
    default = str(DEFAULT_KV_BYTES[role])
    on_gpu = f"{config.gpu_memory_share or DEFAULT_GPU_MEMORY_SHARE:g} of what a GPU has left"
    return {"triton": on_gpu, "auto": f"{default}, or {on_gpu}"}.get(config.backend, default)


def describe(config: ClusterConfig, origins: Mapping[str, str], derived: Mapping[str, str]) -> str:
    """One `name = value  (origin)` line per setting: what `--dry-run` prints. `derived`: values that follow
    from other settings, instead of those nobody has given."""
    names = [info.name for info in setting_infos()]
    width = max(map(len, names))

    def line(name: str) -> str:
        if name in derived and name not in origins:
            return f"{name:<{width}} = {derived[name]}  (derived)"
        return f"{name:<{width}} = {getattr(config, name)}  ({origins.get(name, 'default')})"

    return "\n".join(map(line, names))


def parse_size(text: str) -> int | None:
    """Bytes of "512MiB" (= "512M"), "1.5 GB" (powers of 1000) or "1048576"; None if it is none of these."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, prefix, suffix = match.groups()
    base = 1000 if suffix.lower() == "b" else 1024
    return int(float(number) * base ** " kmgt".index(prefix.lower() or " "))


def _setting_info(field: msgspec.inspect.Field) -> SettingInfo:
    assert isinstance(field.type, msgspec.inspect.Metadata)  # every setting has a description
    is_bytes = (field.type.extra or {}).get("unit") == "bytes"
    return SettingInfo(
        name=field.name,
        flag="--" + field.name.removesuffix("_bytes").replace("_", "-"),
        variable=ENV_PREFIX + field.name.removesuffix("_bytes").upper(),
        help=(field.type.extra_json_schema or {})["description"],
        default=field.default,
        expected="a size like 512MiB" if is_bytes else _expected(field.type.type),
        is_bytes=is_bytes,
    )


def _expected(kind: msgspec.inspect.Type) -> str:
    if isinstance(kind, msgspec.inspect.LiteralType):
        return "one of " + ", ".join(map(str, kind.values))
    if isinstance(kind, msgspec.inspect.UnionType):
        return _expected(kind.types[0])
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        noun = "a whole number" if isinstance(kind, msgspec.inspect.IntType) else "a number"
        if kind.gt is not None:
            return f"{noun} above {kind.gt:g}"
        if kind.le is not None and kind.ge is not None:
            return f"{noun} from {kind.ge:g} to {kind.le:g}"
        return f"{noun}, at least {kind.ge:g}" if kind.ge is not None else noun
    return "text"


def _from_environment(environment: Mapping[str, str], infos: Mapping[str, SettingInfo]) -> dict[str, str]:
    by_variable = {info.variable: name for name, info in infos.items()}
    found = {}
    for variable, value in environment.items():
        if not variable.startswith(ENV_PREFIX) or variable in _OTHER_VARIABLES:
            continue
        if _SERVICE_LINK.match(variable) or (variable == "BATON_PORT" and value.startswith("tcp://")):
            continue
        if variable not in by_variable:
            suggestion = _suggestion(variable, [*by_variable, *_OTHER_VARIABLES])
            raise ConfigError(f"unknown environment variable {variable}{suggestion}")
        found[by_variable[variable]] = value
    return found


def _from_file(file: Path, infos: Mapping[str, SettingInfo]) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        content = tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"cannot parse the configuration file {file}: {' '.join(str(error).split())}"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"the configuration file {file} must be a table of settings")
    names = {info.flag.removeprefix("--").replace("-", "_"): name for name, info in infos.items()}
    names |= {name: name for name in infos}
    found = {}
    for key, value in content.items():
        name = names.get(str(key).replace("-", "_"))
        if name is None:
            raise ConfigError(f"unknown key in {file}: {key}{_suggestion(str(key), names)}")
        found[name] = value
    return found


def _convert(info: SettingInfo, value: Any, origin: str) -> Any:
    converted = parse_size(value) if info.is_bytes and isinstance(value, str) else value
    try:
        if isinstance(value, bool):  # YAML reads `yes` as one; no setting is
            raise msgspec.ValidationError(f"{value} is no setting")
        if converted is None and value is not None:
            raise msgspec.ValidationError(f"{value} is no size")
        return getattr(msgspec.convert({info.name: converted}, ClusterConfig, strict=False), info.name)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{info.flag}: expected {info.expected}, got `{value}` (from {origin})") from error


def _suggestion(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""
