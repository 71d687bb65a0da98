"""Membership: registers (leases and others), the address book, liveness, and reputation with bans."""
