"""The preview as people read it."""

from atoll.cli.show import number, size, span
from atoll.node.config import NodeConfig
from atoll.node.devices import devices_of
from atoll.node.preview import Machine, Preview
from atoll.protocols.ids import short
from atoll.protocols.invite import Invite
from atoll.protocols.run import RunSpec


def preview_lines(
    spec: RunSpec, invite: Invite, costs: Preview, machine: Machine, config: NodeConfig, unix_s: float
) -> list[str]:
    """What the user agrees to, a line a subject."""
    return [
        f"run        {spec.name}  {short(spec.id)}  by {spec.owner}",
        f"invite     signed by {_signer(spec, invite)}, valid {span(invite.expires - unix_s)}",
        f"model      {costs.parameters:,} parameters, context {spec.model.context}, {spec.outer.rounds} rounds",
        f"memory     {_fit(costs.memory_bytes, machine.memory_free_bytes, 'free')}",
        *_gpu(costs, machine),
        f"disk       up to {_fit(costs.disk_bytes, machine.disk_free_bytes, 'free')}",
        *_traffic(costs, machine),
        f"data       {_data(spec, costs, config)}",
        f"admission  {_admission(spec, invite)}",
        "safety     the run sends no code; peers that you connect to see your address",
    ]


def _signer(spec: RunSpec, invite: Invite) -> str:
    return "the run's owner" if invite.signer == spec.owner else f"{invite.signer} (not the run's owner)"


def _fit(needed: int, free: int, word: str) -> str:
    verdict = "ok" if needed <= free else "TOO LITTLE"
    return f"{size(needed)} needed, {size(free)} {word}: {verdict}"


def _gpu(costs: Preview, machine: Machine) -> list[str]:
    devices = devices_of(machine.device)
    if devices[0] == "cpu":
        ranks = f" in {len(devices)} processes" if len(devices) > 1 else ""
        return [f"device     CPU, {machine.threads} thread{'s' * (machine.threads != 1)}{ranks}"]
    if machine.gpu_free_bytes is None:
        return [f"device     {machine.device}: {size(costs.gpu_bytes)} needed; how much is free is unknown here"]
    return [f"device     {machine.device}: {_fit(costs.gpu_bytes, machine.gpu_free_bytes, 'free')}"]


def _traffic(costs: Preview, machine: Machine) -> list[str]:
    rate = number(costs.rounds_day, 0 if costs.rounds_day >= 10 else 1)
    return [
        f"traffic    about {size(costs.day_up_bytes)} up and {size(costs.day_down_bytes)} down a day, "
        f"{size(costs.join_bytes)} down once to join",
        f"           assumed: {costs.members} members, {size(costs.round_bytes)} up and down a round, "
        f"{span(costs.round_s)} a round, {rate} rounds a day",
    ]


def _data(spec: RunSpec, costs: Preview, config: NodeConfig) -> str:
    if not costs.text:
        return f"{spec.data.source} (needs no file of yours)"
    if config.data:
        return f"your file {config.data}, which must be {costs.text}"
    return f"{costs.text}: you need your own copy; give its path with --data"


def _admission(spec: RunSpec, invite: Invite) -> str:
    if spec.admission.mode == "open":
        return "open: everybody may join"
    if spec.admission.mode == "allowlist":
        return "the owner's list: you are on it"
    named = f" for {invite.token[0].name}" if invite.token and invite.token[0].name else ""
    return f"by invitation: this invite carries a permit{named}"
