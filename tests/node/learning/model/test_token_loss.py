"""Cross-entropy in slabs of tokens, against torch's own of all logits at once."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from atoll.node.learning.model import token_loss
from atoll.node.learning.model.token_loss import each_loss, mean_loss, slab_tokens

D, V = 8, 24


@pytest.fixture(scope="module", autouse=True)
def small_slabs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_loss, "_SLAB_VALUES", 7 * V)
        patch.setattr(token_loss, "_LEAST_TOKENS", 1)
        yield


def given_values(batch, time, seed):
    source = torch.Generator().manual_seed(seed)
    x, head = torch.randn(batch, time, D, generator=source), torch.randn(V, D, generator=source) * 3
    return x, head, torch.randint(0, V, (batch, time), generator=source)


def whole(target, x, head):
    logits = functional.linear(x, head).float()
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


@settings(deadline=None, max_examples=40)
@given(batch=st.integers(1, 4), time=st.integers(1, 12), seed=st.integers(0, 99), scale=st.floats(-3, 3))
def test_loss_and_gradients_are_those_of_all_logits_at_once(batch, time, seed, scale):
    x, head, target = given_values(batch, time, seed)
    leaves = [value.clone().requires_grad_() for value in (x, head)]
    others = [value.clone().requires_grad_() for value in (x, head)]
    ours, theirs = mean_loss(target, *leaves), whole(target, *others).mean()
    (scale * ours).backward()
    (scale * theirs).backward()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(leaves, others, strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert torch.allclose(each_loss(target, x, head), whole(target, x, head), rtol=1e-5, atol=1e-5)


def test_no_slab_has_more_logits_than_said(monkeypatch):
    x, head, target = given_values(4, 10, 1)
    sizes, slabs = [], token_loss._slabs

    def seen(*given):
        for rows, losses, shares in slabs(*given):
            sizes.append(shares.shape)
            yield rows, losses, shares

    monkeypatch.setattr(token_loss, "_slabs", seen)
    mean_loss(target, x.requires_grad_(), head)
    each_loss(target, x.detach(), head)
    assert sizes == ([(7, V)] * 5 + [(5, V)]) * 2
    assert slab_tokens(V) == 7


def test_large_logits_do_not_overflow():
    x, head, target = given_values(2, 9, 3)
    loss = mean_loss(target, (x * 1e3).requires_grad_(), head)
    loss.backward()
    assert torch.isfinite(loss)


def test_under_autocast_products_are_narrow_and_sums_are_not():
    x, head, target = given_values(4, 12, 5)
    wide = mean_loss(target, x, head)
    leaf = head.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        narrow = mean_loss(target, x, leaf)
        theirs = whole(target, x, head).mean()
    narrow.backward()
    assert leaf.grad.dtype == narrow.dtype == torch.float32
    assert float(narrow.detach()) == pytest.approx(float(theirs), rel=1e-5)
    assert float(narrow.detach()) == pytest.approx(float(wide), rel=2e-2)
    assert float(narrow.detach()) != float(wide)


def test_a_second_backward_pass_is_refused():
    """Gradients are scaled where they lie."""
    x, head, target = given_values(2, 9, 7)
    loss = mean_loss(target, x.requires_grad_(), head)
    again = partial(loss.backward, retain_graph=True)
    again()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        again()
