"""`python -m router`, `python -m prefill_worker`, `python -m decode_worker`: one role in this process.

Three ways to say what it is to be, all ending in `cluster.role_process.serve_role`:

1. By hand: options, for hosts without a launcher (`cluster.role_by_hand`). A router prepares the model first.
2. `CONFIG_FILE [--ready-fd N]`: a whole `RouterConfig` or `WorkerConfig` as JSON, for scripts; the descriptor
   gets a line once the role serves.
3. `--launcher-fd N`: told by the local launcher (`cluster.role_launched`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from cluster import preflight
from cluster.cluster_token import exposure, resolve_cluster_token
from cluster.config import ClusterConfig, num_available_cores
from cluster.config_sources import resolve_config, setting_infos
from cluster.errors import BatonError, ConfigError, ModelError
from cluster.gpu_placement import VISIBLE, own_device
from cluster.gpus import find_gpus
from cluster.launch_plan import ENTRIES, process_environment
from cluster.launch_prepare import start_preparation
from cluster.role_by_hand import ROUTER, ROUTER_ADDRESS, SETTINGS, ByHand, config_by_hand
from cluster.role_config import KV_ADDRESS_BY_ROUTE, RouterConfig, WorkerConfig, load_config
from cluster.role_launched import run_launched
from cluster.role_process import FORCED_EXIT_CODE, StopSwitch, serve_role, stop_on_signals
from cluster.wire.messages import Role

_ROLES: Final = {entry: role for role, entry in ENTRIES.items()}

_EPILOG: Final = """\
A cluster by hand, one terminal each, with one secret for all:
  (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > token)
  python -m router         --cluster-token-file token --model demo --port 8000
  python -m prefill_worker --cluster-token-file token --model demo --threads-per-worker 1
  python -m decode_worker  --cluster-token-file token --model demo --threads-per-worker 1
The order does not matter. Across machines the router gets --listen tcp:0.0.0.0:8500 and every worker
--router tcp:ROUTER_HOST:8500. On a host with several GPUs each worker gets a --device cuda:K. Every setting
may also be BATON_SETTING in the environment (the secret: BATON_CLUSTER_TOKEN) or a key of the --config file.
SIGTERM or Ctrl-C drains the process, again ends it.
"""


def main(entry: str) -> None:
    """Run this process as the role whose service is `entry`, and exit."""
    role = _ROLES.get(entry)  # None: a role of tests, which has no options
    options = _parser(entry, role).parse_args()
    if options.launcher_fd is not None:
        sys.exit(run_launched(entry, options.launcher_fd))
    try:
        preflight.check_own_packages()
        if options.config_file is not None:
            _refuse_others(options)
            config = _read(options.config_file)
        elif role is not None:
            config = _by_hand(role, options)
        else:
            raise ConfigError("no configuration file is given")
    except BatonError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(FORCED_EXIT_CODE)
    switch = StopSwitch()
    stop_on_signals(switch)
    cause = serve_role(entry, config, switch, lambda: _announce(options.ready_fd))
    if cause:  # standard error has it, unless the log is elsewhere
        sys.exit(1 if config.log.file is None else f"error: {cause}")


def _parser(entry: str, role: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {entry.partition('.')[0]}",
        usage="%(prog)s [OPTIONS] | CONFIG_FILE [--ready-fd N]",
        description=f"One {role or 'role'} process of a cluster.",
        epilog=_EPILOG if role is not None else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "config_file", nargs="?", type=Path, help="JSON file with the whole configuration, instead of options"
    )
    parser.add_argument(
        "--ready-fd", type=int, metavar="N", help="descriptor that gets a line once the role serves"
    )
    parser.add_argument("--launcher-fd", type=int, help=argparse.SUPPRESS)
    if role is None:
        return parser
    place = parser.add_argument_group("its place in the cluster")
    place.add_argument("--name", help=f"unique in the cluster (default: {role}-0)")
    if role == ROUTER:
        place.add_argument(
            "--listen",
            metavar="ADDRESS",
            help=f"where workers dial in: tcp:HOST:PORT or unix:/PATH (default: {ROUTER_ADDRESS})",
        )
    else:
        place.add_argument(
            "--router",
            action="append",
            metavar="ADDRESS",
            help=f"where a router listens; once for each (default: {ROUTER_ADDRESS})",
        )
        place.add_argument(
            "--epoch",
            type=int,
            help="number of this start, above those of earlier starts under this name (default: the seconds "
            "since 1970)",
        )
        place.add_argument(
            "--device",
            metavar="cuda:K",
            help="the GPU that it computes on, the only one that it sees (default: the first visible one)",
        )
    if role == Role.DECODE.value:
        place.add_argument(
            "--kv-address",
            metavar="ADDRESS",
            help="where prefill workers dial in (default: any port, at the address that reaches the router)",
        )
    settings = parser.add_argument_group("settings")
    settings.add_argument("--config", type=Path, metavar="FILE", help="YAML or TOML file with settings")
    infos = {info.name: info for info in setting_infos()}
    for name in SETTINGS[role]:
        text = infos[name].help_with_default.replace("%", "%%")
        settings.add_argument(infos[name].flag, dest=name, metavar="VALUE", help=text)
    return parser


def _by_hand(role: str, options: argparse.Namespace) -> RouterConfig | WorkerConfig:
    """The configuration; the environment is set as it must be before libraries load.

    Raises:
        BatonError: a setting cannot work, in one sentence.
        KeyboardInterrupt: a signal came while the model was prepared.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    flags = {name: value for name in SETTINGS[role] if (value := getattr(options, name)) is not None}
    config = resolve_config(flags, os.environ, options.config).config
    name = options.name or f"{role}-0"
    if role == ROUTER:
        hand = ByHand(name, (options.listen or ROUTER_ADDRESS,))
    else:
        epoch = int(time.time()) if options.epoch is None else options.epoch
        kv_address = options.kv_address if role == Role.DECODE.value else None
        hand = ByHand(
            name, tuple(options.router or [ROUTER_ADDRESS]), epoch, kv_address or KV_ADDRESS_BY_ROUTE
        )
    token = resolve_cluster_token(config.cluster_token_file, os.environ, None)
    own = config_by_hand(
        role,
        config,
        hand,
        model_name=preflight.check_model(config.model),
        token=token,
        num_cores=num_available_cores(),
    )
    if config.cluster_token_file is not None and (warning := exposure(config.cluster_token_file)):
        print(warning, file=sys.stderr)
    if isinstance(own, WorkerConfig):
        os.environ.update(process_environment(config, own.num_threads))
        if options.device is not None:  # read once, when the process first asks for a GPU
            os.environ[VISIBLE] = own_device(options.device, config.backend, find_gpus(), os.environ)
        return own
    os.environ.update(process_environment(config, 1))
    preflight.check_key_limits(config)
    preflight.check_api_keys(config)
    preflight.check_request_limits(config)
    preflight.check_allowed_origins(config)
    preflight.check_allowed_hosts(config)
    preflight.check_redis(msgspec.structs.replace(config, routers=1))
    preflight.check_port(config.host, config.port)
    return msgspec.structs.replace(own, model_dir=_prepared(config))


def _prepared(config: ClusterConfig) -> str:
    """The model's directory, prepared now or before."""
    from cluster.progress import ConversionProgress  # only a router shows any

    with ConversionProgress() as display:
        directory, give_up = start_preparation(
            config, display.report, lambda text: print(text, file=sys.stderr)
        )
        try:
            return directory.result(config.start_timeout_s)
        except TimeoutError as error:
            raise ModelError(
                f"{config.model} is not prepared after {config.start_timeout_s:g} s: allow more with "
                "--start-timeout-s"
            ) from error
        finally:
            give_up()


def _refuse_others(options: argparse.Namespace) -> None:
    """A configuration file is the whole configuration: an option beside it would change nothing."""
    beside = {"config_file", "ready_fd", "launcher_fd"}
    given = [name for name, value in vars(options).items() if value is not None and name not in beside]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{options.config_file} is the whole configuration: drop it, or {flags}")


def _read(file: Path) -> RouterConfig | WorkerConfig:
    try:
        return load_config(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def _announce(ready_fd: int | None) -> None:
    if ready_fd is not None:
        os.write(ready_fd, b"ready\n")
        os.close(ready_fd)
