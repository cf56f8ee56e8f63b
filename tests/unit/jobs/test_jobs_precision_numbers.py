"""What `train.precision` makes of a forward, of a loss, and of a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from jobs.precision import Precision, make_precision

CPU = torch.device("cpu")


def trained(name: str, *, overflows: tuple[int, ...] = (), steps: int = 4) -> tuple[Precision, nn.Linear]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    precision, optimizer = make_precision(name, CPU), torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        with precision.around_forward():
            loss = net(torch.ones(4, 3)).float().square().mean() / 8  # small: of itself nothing overflows
        precision.scaled(loss).backward()  # type: ignore[no-untyped-call]
        precision.unscale(optimizer)
        if step not in overflows:
            precision.step(optimizer)
        precision.update(optimizer, overflow=step in overflows)
        optimizer.zero_grad()
    return precision, net


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_products_are_computed_in_so_many_bits_and_parameters_stay_in_32(name: str, dtype: torch.dtype) -> None:
    precision, net = trained(name)
    with precision.around_forward():
        assert net(torch.ones(1, 3)).dtype == dtype
    assert net.weight.dtype == torch.float32
    assert (precision.to_record() is None) == (name != "fp16")


def test_fp32_means_fp32_for_convolutions_too() -> None:
    """torch's own default are convolutions in tf32."""
    for name, expected in (("fp32", "ieee"), ("tf32", "tf32"), ("fp32", "ieee")):
        make_precision(name, CPU)
        of_convolutions = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        assert (torch.backends.cuda.matmul.fp32_precision, of_convolutions) == (expected, expected)


def test_gradients_have_their_own_size_when_they_are_looked_at() -> None:
    torch.testing.assert_close(trained("fp16")[1].weight, trained("fp32")[1].weight, rtol=1e-3, atol=1e-3)


def test_an_overflow_that_another_rank_has_found_halves_the_scale_here_too() -> None:
    """Nothing is wrong with the gradients of this rank."""
    assert trained("fp16", overflows=(1, 2))[0].scale == 65536 / 4


def test_a_loss_that_is_not_finite_says_nothing_of_the_scale() -> None:
    precision, net = trained("fp16")
    before = precision.to_record()
    precision.scaled(net(torch.full((1, 3), torch.nan)).sum()).backward()  # type: ignore[no-untyped-call]
    precision.unscale(torch.optim.SGD(net.parameters(), lr=0.1))
    precision.discard()
    assert precision.to_record() == before


def test_the_scale_goes_through_a_checkpoint() -> None:
    before, _ = trained("fp16", overflows=(0,))
    after = make_precision("fp16", CPU)
    after.restore(json.loads(json.dumps(before.to_record())))
    assert after.to_record() == before.to_record()
    assert before.to_record() != make_precision("fp16", CPU).to_record()


def test_a_checkpoint_with_a_scale_and_a_training_without_one_say_both() -> None:
    scaled, plain = (make_precision(name, CPU) for name in ("fp16", "bf16"))
    assert scaled.difference(scaled.to_record(), "fp16") == plain.difference(None, "fp32") == ""
    assert scaled.difference(None, "fp32") == (
        "train.precision: fp32 in the checkpoint, fp16 here: it has no gradient scale, and this training needs one; "
        "keep fp32, or start anew from its weights (checkpoint.init_from)"
    )
    assert plain.difference(scaled.to_record(), "fp16").startswith(
        "train.precision: fp16 in the checkpoint, bf16 here: it has a gradient scale, and this training has none; "
    )


def test_what_has_no_effect_on_a_cpu_is_said() -> None:
    assert "no effect on a CPU" in make_precision("tf32", CPU).remark()
    assert "slower than fp32" in make_precision("fp16", CPU).remark()
    assert make_precision("fp32", CPU).remark() == make_precision("bf16", CPU).remark() == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tf32_has_fewer_bits_than_fp32_on_a_gpu() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    one, other = (torch.randn(512, 512, device="cuda", generator=generator) for _ in range(2))
    exact = one.double() @ other.double()
    errors = {}
    for name in ("tf32", "fp32"):
        make_precision(name, torch.device("cuda"))
        errors[name] = (one @ other - exact).abs().max().item()
    assert errors["tf32"] > 10 * errors["fp32"]


def test_an_lstm_computes_in_every_precision_on_a_cpu() -> None:
    """oneDNN has none for fp16; the next training has oneDNN again."""
    lstm, batch = nn.LSTM(2, 4), torch.randn(3, 1, 2)
    for name in ("fp16", "bf16", "fp32"):
        with make_precision(name, torch.device("cpu")).around_forward():
            lstm(batch)[0].float().sum().backward()
        assert torch.backends.mkldnn.enabled == (name != "fp16")
