"""The `fair_share` block of settings files: shares and quotas of users and projects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Optional

from pydantic import Field, StringConstraints

from ascendrun.core.errors import Problem
from ascendrun.core.jobs.fair_share import Quota, SharePolicy
from ascendrun.core.reader.model_reader import read_model
from ascendrun.core.reader.strict import Strict, Texts
from ascendrun.core.reader.yaml_source import texts
from ascendrun.core.settings import SHARE_BLOCK, Settings, SettingsBlocks

AccountName = Annotated[str, StringConstraints(pattern=r"^(project:.+|[^:]+)$")]
"""A user, or `project:` with the `labels.project` of jobs."""


class QuotaModel(Texts):
    devices: Optional[int] = Field(None, ge=0, examples=[64])
    device_hours: Optional[float] = Field(None, ge=0, allow_inf_nan=False, examples=[500])


class ShareModel(Texts):
    """Shares and quotas."""

    half_life_days: float = Field(7.0, gt=0, le=3650)
    shares: Mapping[AccountName, Annotated[float, Field(gt=0, le=1e6)]] = Field({}, examples=[{"alice": 2}])
    quotas: Mapping[AccountName, QuotaModel] = Field({}, examples=[{"alice": {"devices": 64}}])


class Blocks(Strict):
    fair_share: Optional[ShareModel] = Field(None, examples=[{"half_life_days": 7}])


def read_share(settings: Settings) -> SharePolicy | None:
    """Return the policy of the strongest file that has one; None: priorities and age alone decide. Raises
    InvalidInputError with every problem of every file."""
    return settings.strongest(parse_share)


def parse_share(blocks: SettingsBlocks, problems: list[Problem]) -> SharePolicy | None:
    """Return the policy of one settings file; None when it has none, or problems, which are added to `problems`."""
    node, found = blocks.root.entries.get(SHARE_BLOCK), list[Problem]()
    model = None if node is None else read_model(Blocks, {SHARE_BLOCK: texts(node)}, blocks.root, blocks.source, found)
    problems += [replace(one, is_private=True) for one in found]
    share = None if model is None or found else model.fair_share
    if share is None:
        return None
    quotas = {name: Quota(one.devices, one.device_hours) for name, one in share.quotas.items()}
    return SharePolicy(share.half_life_days * 86_400, dict(share.shares), quotas)
