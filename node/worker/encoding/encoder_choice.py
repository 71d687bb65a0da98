"""Where a worker keeps e and the anchor and encodes what it sends: on its GPU, or on the host. Chosen here alone.

A payload is encoded between two inner steps. On the device no weight leaves it for that; but e and the anchor need
8 bytes of its memory for each parameter. What is sent, saved and merged has the same bits on both, so that a run
may be moved from one to the other at any restart.
"""

import logging

import torch

from atoll.node.config.devices import devices_of
from atoll.node.learning.compress.codecs import Encoder, OnHost, codec_of
from atoll.node.runs.capacity.memory_model import memory_shortage
from atoll.protocols.local.worker_messages import StartRequest
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.zeroth_order import is_scalar

log = logging.getLogger(__name__)


def encoder_for(spec: RunSpec, start: StartRequest) -> Encoder:
    """The node's choice (`StartRequest.exchange_on`), if the device can do it; a line in the log says why it
    cannot.

    `auto`: on a GPU whose free memory is twice what that and training need. `device`: wherever it has the room. A
    zeroth-order run encodes nothing, so there is nothing to choose. A k for each tensor is measured on the host.
    """
    device, wanted = devices_of(start.device)[0], start.exchange_on
    host = OnHost(max(1, start.threads))
    if is_scalar(spec) or spec.compress.sizes or wanted == "host" or (wanted == "auto" and device == "cpu"):
        return host
    found = _why_not(spec, start, torch.device(device)) or _tried(spec, torch.device(device))
    if isinstance(found, str):
        log.info("contributions are encoded on the host, not on %s: %s", device, found)
        return host
    log.info("contributions are encoded on %s", device)
    return found


def _why_not(spec: RunSpec, start: StartRequest, device: torch.device) -> str:
    """A reason against the device that needs no trial; empty where there is none."""
    if start.shard:
        return "with shard the trained values come together there"
    if device.type != "cuda":
        return ""
    free, whole = torch.cuda.mem_get_info(device)
    if start.gpu_memory:
        free = min(free, whole * start.gpu_memory // 100 - torch.cuda.memory_reserved(device))
    return memory_shortage(spec, free, spare=start.exchange_on == "auto")


def _tried(spec: RunSpec, device: torch.device) -> Encoder | str:
    """The device's encoder, or why not: its kernels do not run, or give other bits than the host."""
    try:
        from atoll.node.learning.compress.gpu.encoder import OnDevice, fault_of
    except ImportError as error:
        return f"its kernels cannot be loaded: {error}"
    layout = codec_of(spec.compress.codec, spec.compress.most_k).layout(1)
    return fault_of(device, layout, spec.compress.feedback) or OnDevice(device)
