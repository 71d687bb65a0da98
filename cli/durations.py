"""Lengths of time as users write them."""

import re

import click

MAX_DURATION_S = 3650 * 86400
_UNITS_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class Duration(click.ParamType[int]):
    """`30m`, `12h`, `7d`, `2w`: seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Seconds; a usage error for anything else."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", str(value))
        seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
        if not 0 < seconds <= MAX_DURATION_S:
            self.fail(f"{value!r} is not a time like 12h, 7d or 4w (at most 10 years)", param, ctx)
        return seconds
