"""`bench convergence`: each arm is the method that its label names, by the keys that make it that method."""

import re
from functools import reduce
from pathlib import Path

import pytest
from msgspec import UNSET

from atoll.cli.runs.changes import with_changes
from atoll.cli.runs.methods import METHODS, fragments_of, settings_of
from atoll.node.runs.presets import NAMES, fragmented, preset
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import peer_id_of
from atoll_bench.convergence.arms import arm_of, methods, spec_of
from atoll_bench.convergence.parts import Wanted, best_trial

TOTAL = 1500
DENSE = {"compress.codec": "int8", "compress.k": 4096, "compress.feedback_rule": UNSET}
SPARSE = {"compress.codec": "sparse2", "compress.k": 64, "outer.aggregate": UNSET, "outer.spectrum": UNSET}
PLAIN = {"outer.rule": UNSET, "outer.momenta": 0, "compress.feedback_rule": UNSET, "compress.memories": 0}
NESTEROV = {"outer.rule": "nesterov", "outer.momenta": 1}
MUON = {"inner.optimizer": "muon"}
ADAMW = {"inner.optimizer": "adamw", "inner.momentum_share": 1.0}

IS = {
    "adamw-parallel": ADAMW,
    "muon-parallel": MUON,
    "sgd": PLAIN | SPARSE | ADAMW | {"outer.floor_256": 64, "outer.overlap_steps": 0},
    "sgd-muon": PLAIN | SPARSE | MUON,
    "lgreco": PLAIN | SPARSE | ADAMW | {"compress.sizes.goal": "bytes"},
    "lgreco-error": PLAIN | SPARSE | ADAMW | {"compress.sizes.goal": "error"},
    "sgd-overlap": PLAIN | SPARSE | ADAMW | {"outer.overlap_steps": 4, "outer.late": UNSET},
    # ω of the gradient's share is what its trials change.
    "sgd-slow": PLAIN
    | SPARSE
    | {"inner.optimizer": "adamw", "inner.beta1": 0.995, "inner.beta2": 0.999, "compress.feedback": 0.98},
    "average": {"outer.rule": "average", "outer.alpha_256": 256} | DENSE | ADAMW,
    "average-float32": {"outer.rule": "average", "outer.alpha_256": 256, "exact": True} | ADAMW,
    "nesterov": NESTEROV | DENSE | ADAMW | {"outer.beta_256": 230, "outer.aggregate": UNSET},
    "nesterov-float32": NESTEROV | ADAMW | {"outer.beta_256": 230, "exact": True},
    "nesterov-muon": NESTEROV | DENSE | MUON | {"outer.beta_256": 154},
    "slowmo": {"outer.rule": "slowmo", "outer.momenta": 1, "outer.beta_256": 128} | DENSE | ADAMW,
    "co2": {"outer.rule": "co2", "outer.momenta": 2, "outer.beta_256": 128, "outer.clip_65536": 1311}
    | DENSE
    | ADAMW,
    "isotropic": NESTEROV | DENSE | ADAMW | {"outer.beta_256": 205, "outer.spectrum": "isotropic"},
    "edit": NESTEROV | DENSE | ADAMW | {"outer.beta_256": 205, "outer.aggregate": "edit"},
    "blend": NESTEROV
    | ADAMW
    | {
        "outer.beta_256": 230,
        "outer.late": "blend",
        "outer.keep_256": 128,
        "outer.overlap_steps": 4,
        "compress.codec": "e3m0",
        "compress.feedback": 0.0,
    },
    "reference": PLAIN
    | ADAMW
    | {
        "compress.codec": "lookup2",
        "outer.floor_256": 1,
        "outer.aggregate": "clip",
        "outer.most_256": 65536,
        "outer.alpha_256": 256,
    },
    # One memory beside e: h, each member's part of the momentum of the fold, which is the mean over all.
    "econtrol": SPARSE
    | ADAMW
    | {
        "outer.rule": "slowmo",
        "outer.beta_256": 255,
        "outer.floor_256": 256,
        "outer.alpha_256": 256,
        "compress.feedback_rule": "econtrol",
        "compress.feedback": 1.0,
        "compress.memories": 1,
        "pace.least_256": 256,
        "pace.most_256": 256,
    },
    # Also one, u. The fold has no momentum, since the members have it.
    "dgc": SPARSE
    | ADAMW
    | {
        "outer.momenta": 0,
        "outer.rule": UNSET,
        "compress.feedback_rule": "dgc",
        "compress.feedback": 1.0,
        "compress.memories": 1,
        "first k": 1024,
        "last k": 64,
    },
}
"""By name, the settings without which the arm is another method."""

PUBLISHED = {
    "nesterov": ("outer.alpha_256=179",),
    "nesterov-muon": ("outer.alpha_256=179",),
    "edit": ("outer.alpha_256=179",),
    "slowmo": ("outer.alpha_256=256",),
    "co2": ("outer.alpha_256=256",),
    "isotropic": ("outer.alpha_256=461",),
    "blend": ("outer.alpha_256=102",),
    "sgd": ("compress.feedback=0.95",),
    "econtrol": ("compress.control=0.1",),
    "dgc": ("compress.momentum=0.9", "outer.alpha_256=26"),
    "sgd-slow": ("inner.momentum_share=0.98",),
}
"""Settings of the papers that must be among what is tried."""


def specs_of(name):
    """The RunSpec of each of a method's trials, or of those that its own settings are tuned by."""
    method = methods()[name]
    trials = methods()[method.tuned_as or name].trials
    return [(trial, spec_of(arm_of(name, "micro", total=TOTAL, seed=1, trial=trial))) for trial in trials]


def seen_of(key, name, spec):
    derived = {
        "exact": methods()[name].exact,
        "compress.memories": spec.compress.memories(spec.outer.momenta),
        "first k": spec.compress.k_of(0),
        "last k": spec.compress.k_of(spec.outer.rounds - 1),
    }
    return derived[key] if key in derived else reduce(getattr, key.split("."), spec)


@pytest.mark.parametrize("name", methods())
def test_an_arm_is_what_its_label_says_in_each_of_its_trials(name):
    for trial, spec in specs_of(name):
        seen = {key: seen_of(key, name, spec) for key in IS[name]}
        assert seen == IS[name], trial


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_settings_are_among_the_trials(name):
    assert any(set(PUBLISHED[name]) <= set(trial) for trial, _ in specs_of(name))


def test_the_rate_of_dgc_falls_as_its_momentum_rises():
    for trial, spec in specs_of("dgc"):
        assert spec.outer.alpha_256 == round(256 * (1 - spec.compress.beta)), trial


def test_the_clip_of_co2_is_below_what_a_round_can_move_a_value_by():
    for _, spec in specs_of("co2"):
        assert spec.outer.clip_65536 / 65536 < spec.steps(0) * spec.inner.lr / 2


def test_slow_momentum_has_the_feedback_that_won_without_it():
    # As on the page; a comparison with another one would say something of β, not of the momentum.
    assert "compress.feedback=0.98" in methods()["sgd-slow"].settings
    assert best_trial("sgd-slow", Wanted("micro", 4500, 3), {}) is None


# --- the table of the documentation -----------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "outer-loop.md").read_text("utf-8")
ROW = re.compile(r"^\| `([a-z0-9-]+)` \| ((?:DENSE|SPARSE|`).*=.*) \|$", re.M)
METHOD_OF = {
    "sgd": "sparseloco",
    "reference": "sparseloco-code",
    "nesterov": "diloco",
    "nesterov-muon": "muloco",
    "blend": "streaming",
    "isotropic": "isoloco",
    **{name: name for name in ("average", "slowmo", "edit", "co2", "econtrol", "dgc", "lgreco")},
}
"""By name of the bench, the one of `run new --method`."""
TRIED_ALONE = {"fedbuff", "fedfix", "gossip"}
"""Methods whose trials are those of unequal.py and gossip.py."""
TOO_LARGE = {("gossip", "350m"), ("gossip", "1b")}
"""A daemon would have more than 256 MiB of one pull in memory."""
DENSE_BYTES = {"nesterov", "average", "nesterov-muon", "slowmo", "edit", "co2", "isotropic"}
"""Published with float32: no error feedback is kept."""


def code(text):
    return re.findall(r"`([^`=]+=[^`]+)`", text)


def on_the_page():
    """By method, its settings; DENSE and SPARSE are the sentences that say what they stand for."""
    short = {
        word: code(re.search(rf"{word} is ([^:]+?)[:.](?:\s)", PAGE.replace("\n", " "))[1])
        for word in ("DENSE", "SPARSE")
    }
    return {name: [*short.get(cell.split()[0], ()), *code(cell)] for name, cell in ROW.findall(PAGE)}


def documented(name):
    spec = with_changes(preset("tiny", peer_id_of(bytes(range(32))), 1), settings_of(METHOD_OF[name], None, ()))
    count = fragments_of(METHOD_OF[name], None)
    return spec if count is None else fragmented(spec, count)


def test_the_page_has_the_table_of_methods():
    assert {name: sorted(found) for name, found in on_the_page().items()} == {
        name: sorted(settings.split()) for name, settings in METHODS.items()
    }
    assert {*METHOD_OF.values(), *TRIED_ALONE} == set(METHODS)


@pytest.mark.parametrize("name", METHOD_OF)
def test_a_documented_method_is_the_one_that_the_bench_trains(name):
    spec, wanted = documented(name), IS[name]
    assert {key: seen_of(key, name, spec) for key in wanted} == wanted
    assert spec.reduce is None or name == "sgd"
    assert spec.outer.overlap_steps == (4 if name == "blend" else 0)
    assert spec.compress.feedback == 0 or name not in DENSE_BYTES
    published = dict(part.split("=") for part in PUBLISHED.get(name, ()))
    assert spec.outer.alpha_256 == int(published.get("outer.alpha_256", 256))


@pytest.mark.parametrize("size", NAMES)
@pytest.mark.parametrize("method", METHODS)
def test_every_preset_can_be_trained_by_every_method(method, size):
    bare, settings = preset(size, peer_id_of(bytes(range(32))), 1), settings_of(method, None, ())
    if (method, size) in TOO_LARGE:
        with pytest.raises(ConfigError, match="the model is too large"):
            with_changes(bare, settings)
        return
    spec = with_changes(bare, settings)
    assert (fragmented(spec, 4) if method == "streaming" else spec).reduce is None or method == "sparseloco"
