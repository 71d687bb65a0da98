"""TXT records from this machine's DNS resolvers, through dnspython. Every failure is Unreachable."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.protocols.errors import Unreachable

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

LOOKUP_S = 4.0
"""Deadline of one lookup, in seconds, over all DNS servers of the machine together."""


@dataclass(frozen=True, slots=True)
class TxtRecords:
    """The TXT records of one DNS name, and how long they may be cached."""

    texts: tuple[bytes, ...]
    ttl_s: float


TxtLookup = Callable[[str], Awaitable[TxtRecords]]
"""Looks up the TXT records of a DNS name. Raises Unreachable."""


async def system_lookup(name: str, resolver: "Resolver | None" = None) -> TxtRecords:
    """TXT records of `name` through `resolver`, by default this machine's resolvers as configured now.

    Raises Unreachable.
    """
    # Lazy: dnspython loads QUIC and trio, 0.2 s and 10 MB. Only nodes with /dnsaddr seeds pay for it.
    import dns.asyncresolver
    import dns.exception
    import dns.resolver

    try:
        asked = resolver or dns.asyncresolver.Resolver()
        answer = await asked.resolve(name, "TXT", search=False, lifetime=LOOKUP_S)
    except dns.resolver.NoResolverConfiguration as error:
        raise Unreachable("no DNS server is configured on this machine") from error
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
    return TxtRecords(texts, float(answer.rrset.ttl) if answer.rrset is not None else 0.0)
