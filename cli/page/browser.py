"""Opens an address in the user's browser, where there is a screen to show it on."""

import os
import sys
import webbrowser
from collections.abc import Mapping

_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")


def has_screen(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> bool:
    """Whether a browser can show a page here.

    On Linux without a screen `webbrowser` would run a text browser in this terminal, or wait for one.
    """
    return platform in ("darwin", "win32") or any(environ.get(name) for name in _SCREENS)


def reachable(url: str) -> str:
    """The address with this machine in place of "every address", which names no machine to browse to."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def open_page(url: str) -> bool:
    """Open the address in a browser. Returns whether one was started."""
    if not has_screen():
        return False
    try:
        return webbrowser.open(reachable(url))
    except (webbrowser.Error, OSError):
        return False
