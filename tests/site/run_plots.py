"""Draws the pictures of the documentation from the report of a real swarm:

    atoll sim -n 3 --late-join --kill -o report.json
    python -m tests.site.run_plots report.json docs/pictures

The same report gives the same bytes. Each picture is an SVG of at most PICTURE_BYTES.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PICTURE_BYTES = 60_000
SHARES = ("steps", "wait", "transfer", "encode", "fold", "checkpoint", "evaluate", "start", "down")
_SETTINGS = {"svg.hashsalt": "atoll", "svg.fonttype": "none", "font.size": 8.0, "path.simplify": False}
Row = Mapping[str, Any]


def rows_by_node(report: Mapping[str, Any]) -> dict[int, list[Row]]:
    """The rows of each node in the order of its rounds."""
    found: dict[int, list[Row]] = {}
    for each in report["rounds"]:
        for row in each["nodes"]:
            found.setdefault(row["node"], []).append(row)
    return found


def losses(report: Mapping[str, Any]) -> list[tuple[int, int, int, float]]:
    """Of each round: its number, tokens of all so far, bytes sent so far, mean training loss of its members."""
    points, tokens, sent = [], 0, 0
    for each in report["rounds"]:
        nodes = each["nodes"]
        tokens += sum(row["tokens"] for row in nodes if row["final"] and row["peer"] in row["contributors"])
        sent += sum(row["bytes_up"] for row in nodes)
        values = [row["train_loss"] for row in nodes if row["train_loss"] is not None]
        if values:
            points.append((each["round"], tokens, sent, sum(values) / len(values)))
    return points


def draw_loss(report: Mapping[str, Any], axes: Sequence[Any]) -> None:
    """Training loss against tokens, and against bytes that all nodes sent."""
    points = losses(report)
    for at, (label, unit) in enumerate((("tokens of all members, millions", 1e6), ("sent by all nodes, MB", 1e6))):
        axes[at].plot([point[1 + at] / unit for point in points], [point[3] for point in points], linewidth=1)
        axes[at].set_xlabel(label)
        axes[at].set_ylabel("training loss, nats per token")
        axes[at].grid(alpha=0.3)


def draw_rounds(report: Mapping[str, Any], axes: Sequence[Any]) -> None:
    """Who contributed to which round; and what the workers did with their time."""
    numbers = {peer: int(node) for node, peer in report["nodes"].items()}
    sets = {
        each["round"]: {peer for row in each["nodes"] for peer in row["contributors"]} for each in report["rounds"]
    }
    for peer, node in numbers.items():
        there = [number for number, authors in sets.items() if peer in authors]
        axes[0].plot(there, [node] * len(there), "s", markersize=3)
    axes[0].set_yticks(sorted(numbers.values()), [f"node {node}" for node in sorted(numbers.values())])
    axes[0].set_xlabel("round; a mark: its work is in the round's set")
    whole = rows_by_node(report)
    bottom = dict.fromkeys(whole, 0.0)
    for share in SHARES:
        part = {node: sum(row[f"{share}_s"] for row in rows) for node, rows in whole.items()}
        axes[1].barh(list(part), list(part.values()), left=list(bottom.values()), label=share, height=0.6)
        bottom = {node: bottom[node] + part[node] for node in whole}
    axes[1].set_yticks(list(whole), [f"node {node}" for node in whole])
    axes[1].set_xlabel("seconds of the worker")
    axes[1].legend(fontsize=6, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))


PICTURES: Mapping[str, Callable[[Mapping[str, Any], Sequence[Any]], None]] = {
    "run-loss.svg": draw_loss,
    "run-rounds.svg": draw_rounds,
}


def write_pictures(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all pictures into `folder`; their paths. Raises ValueError where one is too large."""
    import matplotlib
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(_SETTINGS):
        for name, draw in PICTURES.items():
            figure = Figure(figsize=(7.2, 2.8), layout="constrained")
            draw(report, figure.subplots(1, 2))
            figure.savefig(folder / name, format="svg", metadata={"Date": None})
            if (size := (folder / name).stat().st_size) > PICTURE_BYTES:
                raise ValueError(f"{name} has {size} bytes, and {PICTURE_BYTES} are enough")
            paths.append(folder / name)
    return paths


def main(arguments: Sequence[str]) -> int:
    """Exit status 0: the pictures are written."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m tests.site.run_plots REPORT.json FOLDER\n")
        return 2
    report = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    for path in write_pictures(report, Path(arguments[1])):
        sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
