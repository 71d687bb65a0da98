"""Nothing that is secret, or leads to a machine, is left in a text; what helps with a bug is."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.doctor.redaction import ADDRESS, Redaction, forms_of, hosts_in

KEY = bytes(range(100, 132))
PEER = "12D3KooWByRxyokKmxMNkMYp1SavrjyivNPwMg3K5hmXsCdFk6TW"


def clean(text: str, secrets: tuple[str, ...] = (), names: dict[str, str] | None = None) -> str:
    return Redaction(secrets, names or {}).text(text)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("join atoll:aaqac2lxyz234567abcdefghij now", "join <invite> now"),
        ("JOIN ATOLL:AAQAC2LXYZ234567ABCDEFGHIJ", "JOIN <invite>"),
        ("at /ip4/203.0.113.7/udp/4710/quic-v1", "at /ip4/<address>/udp/4710/quic-v1"),
        ("at /ip6/2001:db8::7/tcp/1", "at /ip6/<address>/tcp/1"),
        ("at /dns4/otter.example.net/tcp/1", "at /dns4/<address>/tcp/1"),
        ("/ip4/127.0.0.1/tcp/1 and /ip4/0.0.0.0/tcp/2", "/ip4/127.0.0.1/tcp/1 and /ip4/0.0.0.0/tcp/2"),
        ("from 198.51.100.23:4710,", "from <address>:4710,"),
        ("from [2001:db8:0:1::42]:80", "from [<address>]:80"),
        ("fe80::1%eth0 is up", "<address> is up"),
        ("hardware 00:1b:44:11:3a:b7", "hardware <address>"),
        ("mail bob.smith+x@example.org", "mail <address>"),
        ("https://bob:hunter2@example.org/x", "https://<secret>@example.org/x"),
        ("HF_TOKEN=hf_abc123", "HF_TOKEN=<secret>"),
        ('{"password": "hunter 2"}', '{"password": <secret>}'),
        ("Authorization: Bearer abc.def", "Authorization: <secret>"),
        (f"peer {PEER} and {PEER}", "peer peer-1 and peer-1"),
        (f"digest {'ab' * 32}", "digest abababab…"),
        (f"key {base64.b64encode(KEY).decode()}", "key <secret>"),
        ("12:34:56.789 tokens_per_s=7164 version 1.1.12", "12:34:56.789 tokens_per_s=7164 version 1.1.12"),
        ('"time":"2026-01-02T03:04:05.678+00:00"', '"time":"2026-01-02T03:04:05.678+00:00"'),
        ("File node/daemon/coordinator/contribution_sets.py", "File node/daemon/coordinator/contribution_sets.py"),
    ],
)
def test_what_stays_and_what_goes(text, left):
    assert clean(text) == left


def test_known_secrets_and_names_go_wherever_they_stand():
    found = clean("xxhunter2xx on otter, not on otters", ("hunter2",), {"otter": "<host>", "ab": "<user>"})
    assert found == "xx<secret>xx on <host>, not on otters"


@pytest.mark.parametrize("form", forms_of(KEY))
def test_a_key_goes_in_every_form(form):
    assert form not in clean(f"the key is {form}", tuple(forms_of(KEY)))


def test_hosts_of_multiaddrs_are_known_by_name():
    assert hosts_in("/dns4/otter.example.net/tcp/1 /ip4/1.2.3.4/tcp/2") == {"otter.example.net", "1.2.3.4"}


@given(
    st.ip_addresses(v=4) | st.ip_addresses(v=6), st.sampled_from(["{}", "at {} now", "[{}]:80", "'{}'", "={},"])
)
def test_no_address_is_left(address, form):
    if not (address.is_loopback or address.is_unspecified):
        assert clean(form.format(address)) == form.format(ADDRESS)


@given(st.binary(min_size=32, max_size=32))
def test_a_key_that_nobody_knew_is_not_left_in_its_usual_forms(key):
    for form in (key.hex(), base64.b32encode(key).decode()):
        assert form not in clean(f"key {form}")
