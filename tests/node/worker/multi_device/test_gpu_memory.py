"""The share of a GPU's memory that its user leaves to the node reaches torch, in each process of the worker.

No GPU is needed: torch's own function runs up to the call that would set the limit in its allocator.
"""

import logging

import msgspec
import pytest
import torch

from atoll.node.config.guest import GuestConfig, read_guest
from atoll.node.worker import session
from atoll.node.worker.encoding.encoder_choice import encoder_for
from atoll.node.worker.multi_device import group, rank
from atoll.node.worker.multi_device.group import limit_memory
from atoll.node.worker.session import Session
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.local import rank_messages
from atoll.protocols.local.worker_messages import StartRequest
from tests.node.worker.session_home import ME, SPEC

BEGIN = rank_messages.Begin(codec.encode(SPEC), 1, 2, "cuda:1", 1, "float32", False, False, "", 0, False, 30)


class Reached(Exception):
    """The limit was set."""


@pytest.fixture
def limits(monkeypatch):
    """What torch's allocators were told: share and number of the device."""
    told = []
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *words: told.append(words), raising=False)
    return told


def test_torch_takes_each_device_that_a_node_may_name(limits):
    for device in ("cuda", "cuda:0", "cuda:3", "cpu"):
        limit_memory(device, 0.25)
    assert limits == [(0.25, 0), (0.25, 0), (0.25, 3)]


@pytest.mark.parametrize(("percent", "told"), [(30, [(0.3, 2)]), (100, [(1.0, 2)]), (0, [])])
def test_the_worker_sets_it_before_it_holds_anything_there(tmp_path, monkeypatch, limits, percent, told):
    monkeypatch.setattr(group, "check_device", lambda device: None)

    def kernels(spec):
        raise Reached

    monkeypatch.setattr(session, "KernelsBeside", kernels)
    start = StartRequest(codec.encode(SPEC), ME, str(tmp_path), "", 1, "cuda:2", gpu_memory=percent)
    with pytest.raises(Reached):
        Session(start)
    assert limits == told


@pytest.mark.parametrize(("percent", "told"), [(30, [(0.3, 1)]), (0, [])])
def test_each_further_process_sets_it_for_its_own_device(monkeypatch, limits, percent, told):
    begin = msgspec.structs.replace(BEGIN, gpu_memory=percent)
    monkeypatch.setattr(rank, "read_frame", lambda pipe, kind: begin)
    monkeypatch.setattr(group, "check_device", lambda device: None)
    monkeypatch.setattr(rank.os, "dup", lambda number: number)
    monkeypatch.setattr(rank.os, "dup2", lambda *numbers: None)
    monkeypatch.setattr(rank.faulthandler, "enable", lambda: None)

    def write(pipe, frame):
        raise Reached

    monkeypatch.setattr(rank.os, "write", write)
    with pytest.raises(Reached):
        rank.main()
    assert limits == told


@pytest.mark.parametrize(("percent", "reserved", "left"), [(0, 0, 6), (100, 0, 6), (50, 0, 4), (50, 1, 3)])
def test_the_encoder_is_offered_what_is_left_of_the_share(monkeypatch, caplog, percent, reserved, left):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6, 8))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    asked = []
    monkeypatch.setattr(
        "atoll.node.worker.encoding.encoder_choice.memory_shortage",
        lambda spec, free, spare: asked.append(free) or "too little",
    )
    caplog.set_level(logging.INFO)
    encoder_for(SPEC, StartRequest(codec.encode(SPEC), ME, "", "", 1, "cuda:0", gpu_memory=percent))
    assert asked == [left]


@pytest.mark.parametrize("percent", [-1, 101])
def test_a_share_is_one(percent):
    with pytest.raises(ConfigError, match=r"guest.gpu_memory = -?\d+ is outside 1 … 100"):
        read_guest(GuestConfig(gpu_memory=percent))
    read_guest(GuestConfig(gpu_memory=100))
