"""Names become addresses: the walk over records in memory, the resolver against a real DNS server on loopback."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.discovery import dns as dns_lookup
from atoll.p2p.discovery.dns import LOOKUP_S, TxtRecords
from atoll.p2p.discovery.dnsaddr import (
    DEPTH_MAX,
    LOOKUPS_MAX,
    REFRESH_MIN_S,
    RESULTS_MAX,
    DnsSeed,
    parse_record,
    resolve,
)
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.membership.address_book import is_dns_seed, parse_seed
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import ConfigError, DecodeError, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId
from tests.waiting import HANGS_S


def peer(number: int) -> PeerId:
    return Identity(number.to_bytes(32, "big")).peer_id


P, Q = peer(1), peer(2)
SEED = parse_seed("/dnsaddr/seed.example.org")
TCP = "/ip4/203.0.113.7/tcp/4001"
QUIC = "/ip4/203.0.113.7/udp/4001/quic-v1"


class Zone:
    """TXT records by name, and who asked."""

    def __init__(self, **names: list[str]) -> None:
        self.texts = {f"_dnsaddr.{name}.example.org": texts for name, texts in names.items()}
        self.asked: list[str] = []
        self.ttl_s = 300.0

    async def lookup(self, name: str) -> TxtRecords:
        self.asked.append(name)
        if name not in self.texts:
            raise Unreachable(f"the DNS name {name} does not exist")
        return TxtRecords(tuple(text.encode() for text in self.texts[name]), self.ttl_s)


def walk(zone: Zone, seed: PeerAddress = SEED):
    return asyncio.run(resolve(seed, zone.lookup))


def test_seeds_by_name() -> None:
    assert (SEED.peer, SEED.maddrs) == ("", ("/dnsaddr/seed.example.org",))
    assert parse_seed(f" /dnsaddr/seed.example.org/p2p/{P}\n") == PeerAddress(P, SEED.maddrs)
    assert is_dns_seed(SEED)
    assert not is_dns_seed(parse_seed(f"{TCP}/p2p/{P}"))


@pytest.mark.parametrize(
    "seed",
    [
        *("/dnsaddr/", "/dnsaddr/a b", "/dnsaddr/x/tcp/1", "/dnsaddr/x/p2p/", "/dnsaddr/x/p2p/Qm", "/dnsaddr/-a"),
        *(f"/dnsaddr/{'a.' * 125}a", f"/dnsaddr/x/p2p/{P}/p2p-circuit/p2p/{Q}", "/dnsaddr/ex\u00e4mple.org"),
    ],
)
def test_bad_names_are_refused_with_an_example(seed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_seed(seed)
    assert "/dnsaddr/seed.example.org" in caught.value.hint


def test_records_become_addresses_by_peer() -> None:
    zone = Zone(
        seed=[f"dnsaddr={TCP}/p2p/{P}", "v=spf1 -all", f"dnsaddr={QUIC}/p2p/{P}", f"dnsaddr={TCP}/p2p/{Q}"]
    )
    assert walk(zone).addresses == (PeerAddress(P, (TCP, QUIC)), PeerAddress(Q, (TCP,)))
    only = walk(zone, parse_seed(f"/dnsaddr/seed.example.org/p2p/{Q}"))
    assert only.addresses == (PeerAddress(Q, (TCP,)),)
    with pytest.raises(Unreachable, match=r"no dnsaddr record at _dnsaddr\.seed\.example\.org for"):
        walk(zone, parse_seed(f"/dnsaddr/seed.example.org/p2p/{peer(3)}"))


def test_relayed_addresses_are_kept_and_a_record_without_a_peer_is_refused_with_the_reason() -> None:
    circuit = f"{TCP}/p2p/{Q}/p2p-circuit"
    zone = Zone(seed=[f"dnsaddr={circuit}/p2p/{P}", f"dnsaddr={TCP}", f"dnsaddr={circuit}", "dnsaddr=/nonsense"])
    found = walk(zone)
    assert found.addresses == (PeerAddress(P, (circuit,)),)
    assert found.refused[:2] == (f"{TCP} names no PeerID", f"{circuit} names no PeerID")
    assert len(found.refused) == 3
    with pytest.raises(Unreachable, match=r"no usable dnsaddr record.*tcp/4001 names no PeerID"):
        walk(Zone(seed=[f"dnsaddr={TCP}"]))


def test_names_may_point_to_names_but_not_for_ever() -> None:
    names = {f"n{depth}": [f"dnsaddr=/dnsaddr/n{depth + 1}.example.org"] for depth in range(1, 9)}
    deep = Zone(seed=["dnsaddr=/dnsaddr/n1.example.org"], **names)
    deep.texts[f"_dnsaddr.n{DEPTH_MAX - 1}.example.org"].append(f"dnsaddr={TCP}/p2p/{P}")
    assert walk(deep).addresses == (PeerAddress(P, (TCP,)),)
    assert len(deep.asked) == DEPTH_MAX
    loop = Zone(seed=["dnsaddr=/dnsaddr/seed.example.org", f"dnsaddr={TCP}/p2p/{P}"])
    assert len(walk(loop).addresses) == 1
    assert len(loop.asked) == 1


def test_a_filter_holds_through_nested_names() -> None:
    inner = [f"dnsaddr={TCP}/p2p/{P}", f"dnsaddr={TCP}/p2p/{Q}"]
    zone = Zone(seed=[f"dnsaddr=/dnsaddr/inner.example.org/p2p/{Q}"], inner=inner)
    assert walk(zone).addresses == (PeerAddress(Q, (TCP,)),)


def test_a_hostile_zone_is_bounded() -> None:
    wide = Zone(seed=[f"dnsaddr=/dnsaddr/w{number}.example.org" for number in range(500)])
    for number in range(500):
        wide.texts[f"_dnsaddr.w{number}.example.org"] = [
            f"dnsaddr=/ip4/10.0.{number % 250}.{port}/tcp/{port}/p2p/{peer(port)}" for port in range(1, 9)
        ]
    found = walk(wide)
    assert len(wide.asked) == LOOKUPS_MAX
    assert sum(len(address.maddrs) for address in found.addresses) == RESULTS_MAX


def test_one_dead_branch_does_not_hide_the_others() -> None:
    zone = Zone(seed=["dnsaddr=/dnsaddr/gone.example.org", f"dnsaddr={TCP}/p2p/{P}"])
    assert walk(zone).addresses == (PeerAddress(P, (TCP,)),)
    with pytest.raises(Unreachable, match=r"_dnsaddr\.gone\.example\.org does not exist"):
        walk(Zone(seed=["dnsaddr=/dnsaddr/gone.example.org"]))


@given(
    st.binary(max_size=600), st.from_regex(r"(/(ip4|p2p|dnsaddr|tcp|1\.2\.3\.4|7|p2p-circuit))*", fullmatch=True)
)
def test_any_record_is_an_address_or_a_decode_error(raw: bytes, text: str) -> None:
    for record in (b"dnsaddr=" + raw, b"dnsaddr=" + text.encode()):
        try:
            maddr, _ = parse_record(record)
        except DecodeError:
            continue
        assert maddr.startswith("/")


# The loop of one name, on virtual time.


def test_a_name_is_asked_again_with_back_off_and_after_its_records_expire() -> None:
    async def main() -> None:
        zone, now = Zone(), asyncio.get_running_loop().time
        times: list[float] = []

        async def lookup(name: str) -> TxtRecords:
            times.append(now())
            return await zone.lookup(name)

        found: list[tuple[PeerAddress, ...]] = []
        seed = DnsSeed(SEED, lookup, now=now, rng=random.Random(1))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(seed.serve(found.append))
            await asyncio.sleep(600)
            assert len(times) < 25
            assert max(b - a for a, b in itertools.pairwise(times)) > 30
            assert seed.tries == len(times)
            assert "does not exist" in seed.error
            zone.texts["_dnsaddr.seed.example.org"] = [f"dnsaddr={TCP}/p2p/{P}"]
            zone.ttl_s = 1.0
            await asyncio.sleep(100)
            assert found[0] == seed.addresses == (PeerAddress(P, (TCP,)),)
            assert (seed.tries, seed.error) == (0, "")
            asked = len(times)
            await asyncio.sleep(10 * REFRESH_MIN_S)
            assert 7 <= len(times) - asked <= 14, "a short life of records is not obeyed to the letter"
            del zone.texts["_dnsaddr.seed.example.org"]
            await asyncio.sleep(300)
            assert seed.addresses == (PeerAddress(P, (TCP,)),), "what was known is kept"
            task.cancel()

    run_virtual(main())


def test_a_silent_lookup_has_a_deadline() -> None:
    async def main() -> None:
        async def never(name: str) -> TxtRecords:
            await asyncio.Event().wait()
            raise AssertionError

        started = asyncio.get_running_loop().time()
        with pytest.raises(Unreachable, match="no DNS server answers"):
            await resolve(SEED, never)
        assert asyncio.get_running_loop().time() - started <= LOOKUP_S + 0.1

    run_virtual(main())


# The real resolver against a real server.

Answer = Callable[[dns.message.Message], dns.message.Message | None]


class Server(asyncio.DatagramProtocol):
    """DNS over UDP and TCP on one port of loopback."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.over_tcp = 0

    def connection_made(self, transport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr) -> None:
        reply = self.answer(dns.message.from_wire(data))
        if reply is not None:
            wire = reply.to_wire()
            if len(wire) > 1232:
                reply.answer.clear()
                reply.flags |= dns.flags.TC
                wire = reply.to_wire()
            self.transport.sendto(wire, addr)

    async def on_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2), "big")
        reply = self.answer(dns.message.from_wire(await reader.readexactly(size)))
        self.over_tcp += 1
        wire = reply.to_wire()
        writer.write(len(wire).to_bytes(2, "big") + wire)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def dns_server(answer: Answer) -> AsyncIterator[tuple[Server, dns.asyncresolver.Resolver]]:
    server = Server(answer)
    loop = asyncio.get_running_loop()
    for _ in range(10):
        tcp = await asyncio.start_server(server.on_tcp, "127.0.0.1", 0)
        port = tcp.sockets[0].getsockname()[1]
        try:
            transport, _ = await loop.create_datagram_endpoint(lambda: server, local_addr=("127.0.0.1", port))
            break
        except OSError:  # another program has it
            tcp.close()
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers, resolver.port = ["127.0.0.1"], port
    try:
        yield server, resolver
    finally:
        tcp.close()
        transport.close()


def records(query: dns.message.Message, *texts: str, ttl_s: int = 120) -> dns.message.Message:
    reply = dns.message.make_response(query)
    quoted = [" ".join(f'"{text[at : at + 255]}"' for at in range(0, len(text), 255)) for text in texts]
    reply.answer.append(dns.rrset.from_text(query.question[0].name, ttl_s, "IN", "TXT", *quoted))
    return reply


def refusal(query: dns.message.Message, code: dns.rcode.Rcode) -> dns.message.Message:
    reply = dns.message.make_response(query)
    reply.set_rcode(code)
    return reply


def with_resolver(answer: Answer, work: Callable[[Server, dns.asyncresolver.Resolver], Awaitable[None]]) -> None:
    async def main() -> None:
        async with dns_server(answer) as (server, resolver):
            await work(server, resolver)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_through_a_real_server() -> None:
    asked = []

    def answer(query):
        asked.append(query.question[0].name.to_text())
        return records(query, f"dnsaddr={TCP}/p2p/{P}", f"dnsaddr={QUIC}/p2p/{P}")

    async def work(server, resolver) -> None:
        found = await resolve(SEED, lambda name: dns_lookup.system_lookup(name, resolver))
        assert found.addresses == (PeerAddress(P, found.addresses[0].maddrs),)
        assert set(found.addresses[0].maddrs) == {TCP, QUIC}
        assert found.ttl_s == 120
        assert asked == ["_dnsaddr.seed.example.org."], "no search domains"

    with_resolver(answer, work)


def test_an_answer_that_does_not_fit_comes_over_tcp() -> None:
    async def work(server, resolver) -> None:
        found = await resolve(SEED, lambda name: dns_lookup.system_lookup(name, resolver))
        assert len(found.addresses) == 20
        assert server.over_tcp == 1

    texts = [f"dnsaddr={TCP}/p2p/{peer(number)}" for number in range(1, 21)]
    with_resolver(lambda query: records(query, *texts), work)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda query: refusal(query, dns.rcode.NXDOMAIN), "_dnsaddr.seed.example.org does not exist"),
        (lambda query: refusal(query, dns.rcode.NOERROR), "no dnsaddr record"),
        (lambda query: refusal(query, dns.rcode.SERVFAIL), "no DNS server has an answer"),
        (lambda query: refusal(query, dns.rcode.REFUSED), "no DNS server has an answer"),
        (lambda query: None, "no DNS server answers"),
    ],
)
def test_each_way_to_fail_has_its_words(answer: Answer, words: str, monkeypatch) -> None:
    monkeypatch.setattr(dns_lookup, "LOOKUP_S", 0.5 if "answers" in words else HANGS_S)

    async def work(server, resolver) -> None:
        with pytest.raises(Unreachable, match=words):
            await resolve(SEED, lambda name: dns_lookup.system_lookup(name, resolver))

    with_resolver(answer, work)


def test_this_machines_resolver_fails_in_words_only(monkeypatch) -> None:
    def none(*args, **kwargs):
        raise dns.resolver.NoResolverConfiguration

    monkeypatch.setattr(dns.asyncresolver.Resolver, "read_resolv_conf", none)
    with pytest.raises(Unreachable, match="no DNS server is configured"):
        asyncio.run(dns_lookup.system_lookup("x.example.org"))
