"""TXT records through dnspython. Imported late: it loads QUIC and trio, 0.2 s and 10 MB."""

import dns.asyncresolver
import dns.exception
import dns.resolver

from atoll.p2p.discovery.dns_texts import LOOKUP_S, Texts
from atoll.protocols.errors import Unreachable


async def ask_system(name: str) -> Texts:
    """Through this machine's resolvers, as they are configured now. Raises Unreachable."""
    try:
        resolver = dns.asyncresolver.Resolver()
    except dns.resolver.NoResolverConfiguration as error:
        raise Unreachable("no DNS server is configured on this machine") from error
    return await ask(resolver, name)


async def ask(resolver: dns.asyncresolver.Resolver, name: str) -> Texts:
    """Through `resolver`. Raises Unreachable."""
    try:
        answer = await resolver.resolve(name, "TXT", search=False, lifetime=LOOKUP_S)
    except dns.resolver.NXDOMAIN as error:
        raise Unreachable(f"the DNS name {name} does not exist") from error
    except dns.resolver.NoAnswer as error:
        raise Unreachable(f"no dnsaddr record at {name}") from error
    except dns.resolver.NoNameservers as error:
        raise Unreachable(f"no DNS server has an answer for {name}: they refuse or fail") from error
    except dns.exception.Timeout as error:
        raise Unreachable(f"no DNS server answers for {name} in {LOOKUP_S:.0f} s") from error
    except (dns.exception.DNSException, OSError) as error:
        raise Unreachable(f"no DNS server could be asked for {name}: {error}") from error
    texts = tuple(b"".join(record.strings) for record in answer)
    return Texts(texts, float(answer.rrset.ttl) if answer.rrset is not None else 0.0)
