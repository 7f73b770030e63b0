"""Tokens a second and the share of the cards' peak that they take are one number seen twice."""

from __future__ import annotations

import torch

from ascendrun.planner.models import flops_per_token
from ascendrun.programs.devices.accelerator import Accelerator
from ascendrun.programs.trainer.metrics import mfu, mfu_words, peak_flops

CARD = Accelerator("npu", torch.device("cpu"), "Ascend910B3", None)


def test_a_speed_that_no_card_has_shows_as_more_than_the_whole_of_its_peak():
    """S3-B10: 50 to 80 rows of 2048 tokens a second on 16 cards, 32.5 billion frozen weights."""
    work = flops_per_token(parameters=32_500_000_000, trainable=0, layers=64, hidden=5120, mean_length=2048)
    peak = peak_flops(CARD)
    shares = [mfu(rows * 2048, work, peak, 16) for rows in (50, 80)]
    assert 2 < shares[0] < shares[1] < 5
    assert all("--peak_tflops" in mfu_words(share) for share in shares)
    assert mfu_words(0.412) == " MFU 41.2%" and mfu_words(None) == ""
    assert 0.4 < mfu(16 * 768, 6 * 32.5e9, peak, 16) < 0.6, "a published speed, all weights trained"


def test_a_frozen_weight_is_worth_two_thirds_of_a_trained_one():
    whole = flops_per_token(parameters=1000, trainable=1000, layers=0, hidden=0, mean_length=0)
    frozen = flops_per_token(parameters=1000, trainable=0, layers=0, hidden=0, mean_length=0)
    assert (whole, frozen) == (6000, 4000)


def test_a_card_of_unknown_peak_has_no_share_to_tell_unless_the_peak_is_given():
    unknown = Accelerator("npu", torch.device("cpu"), "Ascend9999", None)
    assert peak_flops(unknown) is None and mfu(1e4, 1e9, None, 1) is None
    assert peak_flops(unknown, 100.0) == 1e14
