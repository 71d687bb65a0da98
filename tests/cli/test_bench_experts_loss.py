"""The long part of `bench experts` without its hours: what it asks of a simulation, what it makes of reports."""

import inspect

from atoll.cli import sim
from atoll.cli.benches import experts_loss
from atoll.node.presets import preset
from atoll.protocols.identity import Identity


def test_it_asks_for_what_a_simulation_takes(monkeypatch):
    asked = []

    def simulate(folder, timeout_s, say, **options):
        options.pop("baselines")
        asked.append(inspect.signature(sim.prepare).bind(folder, **options).arguments)
        return {"checks": [], "val_bpb": 3.0}

    monkeypatch.setattr(experts_loss, "simulate", simulate)
    assert [experts_loss.report_of(holders, lambda _: None)["val_bpb"] for holders in (0, 1)] == [3.0, 3.0]
    assert [one["holders"] for one in asked] == [0, 1]
    spec = preset(experts_loss.PRESET, Identity(bytes(32)).peer_id, 1)
    pace = sim.with_changes(spec, asked[0]["changes"]).pace
    assert (pace.least_256, pace.quorum_256) == (256, 256), "or members had not the same tokens"


def test_the_comparison_is_the_ratio_of_the_last_losses():
    reports = {name: {"val_bpb": bpb, "checks": []} for name, bpb in (("whole", 3.0), ("shared", 3.12))}
    *_, ratio = experts_loss.rows_of(reports)
    assert (ratio.value, ratio.passed) == (1.04, False)
    reports["shared"]["val_bpb"] = None
    assert experts_loss.rows_of(reports)[-1].value is None
