"""NodeConfig: the local choices of one node, from `config.toml` in its home and from flags, which win.

What peers must agree on is in RunSpec and never here. Unknown keys are errors.

`device` is `auto`, one device, or several that take each step together.
"""

import difflib
import errno
import importlib.metadata
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from atoll.node.config.devices import devices_of
from atoll.node.config.guest import GuestConfig, read_guest
from atoll.node.config.loggers import LoggerName, check_loggers
from atoll.node.config.roles import Role, Work, work_of
from atoll.node.daemon.web.server import parse_listen_address
from atoll.p2p.discovery.dht_role import Setting
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.limits.config import LimitsConfig, read_limits
from atoll.p2p.membership.address_book import is_dns_seed, parse_seed
from atoll.p2p.system.atomic_files import disk_fault, open_file
from atoll.p2p.system.control_group import usable_cpus
from atoll.protocols.errors import ConfigError, DiskFault, check_range
from atoll.protocols.ledger.peer_names import composed, name_fault
from atoll.protocols.run.experts import MAX_EXPERTS

MAX_DEVICES = 64
MOST_AVERAGED = 1 << 16
"""Limit of `average_rounds`: integers lose half as many units of 2⁻²⁴, which is nothing below this."""
_GPU = r"cuda:(0|[1-9][0-9]?)"
_DRIVER = Path("/dev/nvidiactl")
_DEVICE = re.compile(r"\s*(\+?\d|GPU-|MIG-)")
"""How a device is named in CUDA_VISIBLE_DEVICES: its number, or its id."""
_ONE = re.compile(rf"auto|cpu|cuda|{_GPU}")
_MANY = re.compile(rf"cpu(,cpu)+|{_GPU}(,{_GPU})+")
SAMPLE_S = 60, 7 * 86400
"""Limits of `sample_every_s`: each text takes some seconds of a core."""
LogLevel = Literal["debug", "info", "warning", "error"]
MAX_SEEDS = 64
MAX_PLACES = 8
_MAX_BYTES = 1 << 20
_UNKNOWN = re.compile(r"unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?")
_MADDR = re.compile(r"(/[a-z0-9-]+(/[^/\s]+)?)+")
_TABLES = {"limits": ("up", "down"), "guest": GuestConfig.__struct_fields__}
"""Keys of a table that have flags of the same names."""
S = TypeVar("S", bound=msgspec.Struct)


def check_devices(text: str) -> None:
    """Raise ConfigError for what no machine can have."""
    devices = devices_of(text)
    if not (_ONE.fullmatch(text) or _MANY.fullmatch(text)):
        raise ConfigError(f"device {text!r} is not one of auto, cpu, cuda, cuda:N, or cuda:0,cuda:1 and so on")
    if len(devices) > MAX_DEVICES:
        raise ConfigError(f"device: {len(devices)} devices; at most {MAX_DEVICES} are legal")
    if devices[0] != "cpu" and len(set(devices)) < len(devices):
        raise ConfigError(f"device {text!r} names a GPU twice")


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Local choices of one node. Every key has a default; the file may be absent."""

    name: str = ""
    """What the node announces itself as to all members of its run, beside its PeerID; empty: nothing. At most 32
    letters, digits and signs, from left to right."""
    roles: tuple[Role, ...] = ()
    """What the node does for the run (docs/roles.md); empty: it trains if it can. `train`; `evaluate`: validates
    final rounds; `seed`: keeps the model and payloads for others; `relay`: as `relay`, and alone without the
    model."""
    listen: tuple[str, ...] = ()
    """Multiaddrs; empty: every interface at `port`, by TCP and QUIC."""
    port: int = 0
    """0: picked at the first start and kept."""
    announce: tuple[str, ...] = ()
    """Multiaddrs that others are told instead of what the node finds out: for port forwards."""
    port_map: bool | None = None
    """Ask the router for a port by UPnP and NAT-PMP; absent: where the transport can."""
    transport: Literal["p2pd", "pylibp2p"] = "p2pd"
    """go-libp2p as a child process, or py-libp2p in this one."""
    connections: int = 192
    """Most open connections; above that, the least used are closed."""
    relay: bool = False
    """Relay for nodes behind routers that cannot be punched."""
    relay_circuits: int = 256
    """Most streams that are relayed at once."""
    relay_bytes_per_day: int = 20_000_000_000
    """Most bytes that are relayed in 24 hours."""
    relay_rate_bytes_s: float = 0.0
    """Bytes a second over all circuits; 0: no cap but those of the node."""
    relay_only: bool = False
    """Be reached through relays only: dial seeds only, and publish no address of this node."""
    seeds: tuple[str, ...] = ()
    """`…/p2p/PEERID` multiaddrs of nodes to dial first."""
    shard_bytes: int = 4 << 30
    """Most disk for fetched shards of a packed text (docs/data.md)."""
    open_rounds_bytes: int = 1 << 30
    """Most disk for payloads of rounds that are not final; 64 such rounds may be open whatever they take, and at
    most 1024."""
    ledger_bytes: int = 8 << 30
    """Most disk that the ledger of a run may use."""
    ledger_author_bytes: int = 256 << 20
    """Most bytes of one author in it."""
    ledger_round_bytes: int = 64 << 10
    """Bytes in it that each final round with an author's work lets this author write."""
    ledger_history: str = "all"
    """`all` records, which newcomers need of some members in runs without `history`; `recent`: those of the newest
    1024 rounds and more, and a summary of the others."""
    ledger_newcomers: int = 256
    """Authors in it that have not shown any work yet; the idlest one of those who bring most goes first."""
    ledger_newcomers_per_minute: int = 60
    """New authors that one neighbour may bring in a minute, once a round is final."""
    limits: LimitsConfig = LimitsConfig()
    """How much of the line this node may use, when, and how much a month."""
    guest: GuestConfig = GuestConfig()
    """When the node may train on a machine that others use too."""
    data: str = ""
    """Path of the text of a run whose source is `file:`."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`; several that take each step together: `cuda:0,cuda:1`, or `cpu,cpu`."""
    shard: bool = False
    """Each of several devices holds a part of what is trained: less memory on each, more traffic between them."""
    exchange_on: Literal["auto", "host", "device"] = "auto"
    """Where contributions are encoded; on a GPU for 8 bytes of its memory a parameter. `auto`: if it has them."""
    threads: int = 0
    """CPU threads of the worker; 0: one per core that this process may use."""
    micro_batch: int = 0
    """Sequences of a step that pass through the model of each device at once; 0: as many as its free memory holds
    and its speed gains from. No peer sees it: only the order of sums follows from it."""
    recompute: Literal["auto", "on", "off"] = "auto"
    """Whether a backward pass computes each layer again instead of storing it: a third more time, little memory.
    `auto`: where one sequence does not fit without. `off`: only after memory ran out."""
    optimizer_states: Literal["auto", "float32", "int8"] = "auto"
    """How the optimizer's moments are stored; `int8`: in a quarter of the memory, and steps differ a little.
    `auto`: `int8` where nothing else fits the free memory. For one device."""
    average_rounds: int | None = None
    """Final rounds over which weights are averaged for `--average` of exports; 0: no average is kept. It takes 4
    bytes a parameter of the disk in each of the two saved states. Absent: 4 in runs with a stable rate, if the
    disk has room."""
    experts: int = 0
    """Experts of each layer that this node may train, where members train some only; 0: as many as its free memory
    has room for."""
    frozen: Literal["float32", "bfloat16", "int8"] = "float32"
    """How experts that this node does not train, or the base of a LoRA run, are stored; a base not as `int8`."""
    frozen_on_host: bool = False
    """Experts that this node does not train stay in the host's memory."""
    dht: Setting = "auto"
    """Announce and find peers and runs in the DHT. `auto`: if the run is public, and this node is reachable or
    `dht_bootstrap` is given."""
    dht_bootstrap: tuple[str, ...] = ()
    """`…/p2p/PEERID` multiaddrs of nodes that serve the DHT, of whatever run."""
    public: bool | None = None
    """Announce the run and this node in the DHT; absent: if everybody may join the run."""
    web: str = ""
    """`IP:PORT` or `localhost:PORT` where a web page and metrics are served; port 0: any free one.

    Empty: nowhere. Whoever reaches the address may read, so other users of this machine too.
    """
    sample_every_s: int = 0
    """Seconds between two sample texts of the run's model on the page, at least (docs/web.md); 0: none. Each is
    written by a process of the lowest priority, on the CPU, where memory is to spare."""
    eval_every: int = 0
    """Rounds from one validation to the next; 0: as often as it takes at most 1 % of the time."""
    log: LogLevel = "info"
    """Least level of what goes to the log file."""
    loggers: tuple[LoggerName, ...] = ()
    """What else gets the losses, times and bytes of each round (docs/monitoring.md): `jsonl`, `csv`,
    `tensorboard`, `trackio`, `wandb`."""

    @property
    def work(self) -> Work:
        """What follows from the roles."""
        return work_of(self.roles, relay=self.relay, eval_every=self.eval_every)

    def check(self) -> None:
        """Raise ConfigError, with the key's name, for values that cannot work."""
        if len(set(self.roles)) < len(self.roles):
            raise ConfigError("roles: one is named twice")
        if fault := name_fault(composed(self.name)):
            raise ConfigError(f"name: {fault}")
        check_devices(self.device)
        if self.shard and len(devices_of(self.device)) == 1:
            raise ConfigError("shard is for several devices", hint="for example --device cuda:0,cuda:1")
        if self.optimizer_states == "int8" and len(devices_of(self.device)) > 1:
            raise ConfigError("optimizer_states int8 is for one device", hint="leave it out, or give one device")
        if not 0 <= self.threads <= 1024:
            raise ConfigError(f"threads = {self.threads} is outside 0 … 1024")
        if not 0 <= self.micro_batch <= 1 << 16:
            raise ConfigError(f"micro_batch = {self.micro_batch} is outside 0 … {1 << 16}")
        check_range("average_rounds", self.average_rounds or 0, 0, MOST_AVERAGED)
        if not 0 <= self.experts <= MAX_EXPERTS:
            raise ConfigError(f"experts = {self.experts} is outside 0 … {MAX_EXPERTS}")
        if not 0 <= self.eval_every <= 1 << 20:
            raise ConfigError(f"eval_every = {self.eval_every} is outside 0 … {1 << 20}")
        if self.sample_every_s and not SAMPLE_S[0] <= self.sample_every_s <= SAMPLE_S[1]:
            limits = f"{SAMPLE_S[0]} … {SAMPLE_S[1]}"
            raise ConfigError(f"sample_every_s = {self.sample_every_s} is outside {limits}, and not 0")
        if self.loggers:
            check_loggers(self.loggers)
        self._check_places()
        self._check_ledger()
        parse_listen_address(self.web)
        read_limits(self.limits)
        read_guest(self.guest)
        _check_seeds("seeds", self.seeds)
        if any(map(is_dns_seed, _check_seeds("dht_bootstrap", self.dht_bootstrap))):
            raise ConfigError("dht_bootstrap: /dnsaddr is for seeds", hint="for example /dns4/NAME/tcp/4710/p2p/…")

    def _check_ledger(self) -> None:
        check_range("shard_bytes", self.shard_bytes, 1 << 20, 1 << 50)
        check_range("open_rounds_bytes", self.open_rounds_bytes, 0, 1 << 50)
        check_range("ledger_bytes", self.ledger_bytes, 1 << 24, 1 << 50)
        check_range("ledger_author_bytes", self.ledger_author_bytes, 1 << 20, self.ledger_bytes)
        check_range("ledger_round_bytes", self.ledger_round_bytes, 1 << 13, 1 << 24)
        if self.ledger_history not in ("all", "recent"):
            raise ConfigError(f"ledger_history = {self.ledger_history!r}", hint='"all" or "recent"')
        check_range("ledger_newcomers", self.ledger_newcomers, 8, 1024)
        check_range("ledger_newcomers_per_minute", self.ledger_newcomers_per_minute, 1, 1 << 16)

    def _check_places(self) -> None:
        for key, maddrs in (("listen", self.listen), ("announce", self.announce)):
            for maddr in maddrs:
                if not _MADDR.fullmatch(maddr) or "/p2p/" in maddr:
                    raise ConfigError(
                        f"{key}: {maddr!r} is not a multiaddr", hint="for example /ip4/0.0.0.0/tcp/4710"
                    )
            if len(maddrs) > MAX_PLACES:
                raise ConfigError(f"{key}: more than {MAX_PLACES}")
        if not 8 <= self.connections <= 1 << 16:
            raise ConfigError(f"connections = {self.connections} is outside 8 … {1 << 16}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port = {self.port} is outside 0 … 65535")
        if not (0 < self.relay_circuits <= 1 << 16 and self.relay_bytes_per_day >= 0):
            raise ConfigError(f"relay_circuits = {self.relay_circuits} is outside 1 … {1 << 16}, or bytes < 0")
        if not 0 <= self.relay_rate_bytes_s < 1e12:
            raise ConfigError(f"relay_rate_bytes_s = {self.relay_rate_bytes_s} is outside 0 … 1e12")
        if self.relay_only and (self.work.relays or self.announce or self.dht is True or self.dht_bootstrap):
            raise ConfigError("relay_only cannot go with relay, announce, dht or dht_bootstrap", hint="drop one")


def _check_seeds(key: str, maddrs: tuple[str, ...]) -> list[PeerAddress]:
    if len(maddrs) > MAX_SEEDS:
        raise ConfigError(f"{key}: more than {MAX_SEEDS}")
    try:
        return [parse_seed(maddr) for maddr in maddrs]
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}", hint=error.hint) from error


def load_config(path: Path, flags: dict[str, Any] | None = None) -> NodeConfig:
    """The file at `path` (defaults where there is none) with `flags` over it. Raises ConfigError.

    A flag that is None was not given. `auto` and 0 are replaced by what this machine has.
    """
    given = {key: value for key, value in (flags or {}).items() if value not in (None, (), [])}
    inner = {table: {key: given.pop(key) for key in keys if key in given} for table, keys in _TABLES.items()}
    values = read_values(path) | given
    for table, flagged in inner.items():
        if flagged and isinstance(values.setdefault(table, {}), dict):
            values[table] = values[table] | flagged
    config = check_changed(path, values)
    device = config.device if config.device != "auto" else "cuda" if _cuda_here() else "cpu"
    threads = config.threads or usable_cpus()
    return msgspec.structs.replace(config, device=device, threads=threads, name=composed(config.name))


def checked_values(path: Path) -> dict[str, Any]:
    """What the file at `path` says, if `start` takes it. Raises ConfigError that names the file and the key."""
    values = read_values(path)
    try:
        check_values(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", hint=error.hint) from error
    return values


def check_changed(path: Path, values: dict[str, Any]) -> NodeConfig:
    """The configuration of the file at `path` with changes, which are in `values` already. Raises ConfigError.

    It names the file only where that is wrong by itself.
    """
    try:
        return check_values(values)
    except ConfigError:
        checked_values(path)
        raise


def check_values(values: dict[str, Any]) -> NodeConfig:
    """The configuration that these values of a file give. Raises ConfigError, with the key's name."""
    config = to_struct(values, NodeConfig)
    config.check()
    return config


def to_struct(values: dict[str, Any], kind: type[S], *, strict: bool = True) -> S:
    """`values` as a struct. Raises ConfigError that names the key, with the likely spelling of an unknown one."""
    try:
        return msgspec.convert(values, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(str(error)), hint=_suggestion(str(error), kind)) from error


def read_values(path: Path) -> dict[str, Any]:
    """What the file at `path` says, not checked; nothing where there is none. Raises ConfigError."""
    try:
        with open_file(path) as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        is_socket = error.errno in (errno.ENXIO, errno.EOPNOTSUPP)
        hint = disk_fault(error, path).hint if is_socket else "check its owner and mode"
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except DiskFault as fault:
        raise ConfigError(f"cannot read {path}: it is not a file", hint=fault.hint) from fault
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES} bytes")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}", hint="correct the line, or move the file away"
        ) from error


def _readable(message: str) -> str:
    """msgspec's message with keys as the file has them: `$.seeds` is `seeds`."""
    found = _UNKNOWN.search(message)
    if found:
        return f"unknown key {'.'.join(filter(None, (found[2], found[1])))}"
    text = re.sub(r" - at `\$\.?([^`]*)`", r" (key \1)", message).replace("`", "")
    return text.removeprefix("Object ").replace("Object missing required field", "missing key")


def _suggestion(message: str, kind: type[msgspec.Struct]) -> str:
    found = _UNKNOWN.search(message)
    if not found:
        return _choices(message, kind)
    for part in filter(None, (found[2] or "").split(".")):
        inner = {f.name: f.type for f in msgspec.structs.fields(kind)}.get(part)
        if not (isinstance(inner, type) and issubclass(inner, msgspec.Struct)):
            return ""
        kind = inner
    names = [field.name for field in msgspec.structs.fields(kind)]
    close = difflib.get_close_matches(found[1], names, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(names)}"


def _choices(message: str, kind: type[msgspec.Struct]) -> str:
    """The legal values of a key that takes one of some words; nothing for other faults."""
    found = re.match(r"Invalid enum value .* - at `\$\.([^`]*)`", message)
    inner: Any = kind
    for part in found[1].split(".") if found else ():
        inner = get_type_hints(inner).get(part) if isinstance(inner, type) else None
    words = get_args(inner) if found else ()
    return f"one of: {', '.join(map(str, words))}" if words else ""


def _cuda_here() -> bool:
    """Whether a CUDA driver is loaded, shows this process a device, and the installed torch is not a CPU build.

    Does not import torch.
    """
    try:
        build = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    # CUDA's own setting: a list that is empty, or begins with what is no device, hides all of them.
    shown = _DEVICE.match(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    return _DRIVER.exists() and "+cpu" not in build and shown is not None
