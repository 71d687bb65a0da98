"""Devices that a node's config names: apart from the config, which a worker need not load."""


def devices_of(text: str) -> tuple[str, ...]:
    """`cuda:0,cuda:1` -> both. The first one is the worker's own."""
    return tuple(text.split(","))
