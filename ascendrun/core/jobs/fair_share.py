"""Fair share between accounts, and quotas: pure.

The order is that of the classic fair-share factor of Slurm (https://slurm.schedmd.com/priority_multifactor.html and
https://slurm.schedmd.com/classic_fair_share.html): 2^(-usage/share), with both as parts of their sums, and a usage that
halves in each half-life; PriorityDecayHalfLife has 7 days by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from ascendrun.core.dataclass import dataclass

HALF_LIFE_S = 7 * 86_400.0
PROJECT = "project:"
"""Start of the name of a project in shares and quotas; other names are users."""


@dataclass(frozen=True)
class Account:
    """Who uses devices. None: not known, no project."""

    user: str | None = None
    project: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return its names in shares and quotas."""
        return (self.user or "", *(() if self.project is None else (PROJECT + self.project,)))


@dataclass(frozen=True)
class Quota:
    """`devices`: that may be in use at a time. `device_hours`: decayed usage, from which on no job starts. None: no
    limit."""

    devices: int | None = None
    device_hours: float | None = None


@dataclass(frozen=True)
class SharePolicy:
    """Shares and quotas by name: a user, or PROJECT with a project. A name without a share has 1."""

    half_life_s: float = HALF_LIFE_S
    shares: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, Quota] = field(default_factory=dict)


class Usage:
    """Device-seconds of each account; what was used at a time is worth half as much after each half-life."""

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self.half_life_s = half_life_s
        self._at_s = 0.0
        self._used: dict[Account, float] = {}  # at that time

    def add(self, account: Account, device_seconds: float, at_s: float) -> None:
        """Add a use at a time, also one before others that were added."""
        if at_s > self._at_s:
            self._used, self._at_s = dict(self.at(at_s)), at_s
        self._used[account] = self._used.get(account, 0.0) + device_seconds * self._left(self._at_s - at_s)

    def add_span(self, account: Account, devices: int, start_s: float, end_s: float) -> None:
        """Add the use of devices from one time to another, each moment with its own decay."""
        life_s = self.half_life_s / 0.6931471805599453  # ln 2
        if end_s > start_s:
            self.add(account, devices * life_s * (1 - self._left(end_s - start_s)), end_s)

    def raise_to(self, account: Account, device_seconds: float, at_s: float) -> None:
        """Add what is missing to a use at a time."""
        self.add(account, max(0.0, device_seconds - self.at(at_s).get(account, 0.0)), at_s)

    def at(self, now_s: float) -> Mapping[Account, float]:
        """Return what each account's use is worth at a time."""
        left = self._left(max(0.0, now_s - self._at_s))
        return {account: used * left for account, used in self._used.items()}

    def copy(self) -> Usage:
        return Usage.from_json(self.to_json())

    def to_json(self) -> dict[str, Any]:
        accounts = [[one.user, one.project, used] for one, used in self._used.items()]
        return {"half_life_s": self.half_life_s, "at_s": self._at_s, "accounts": accounts}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Usage:
        """Raises ValueError, KeyError or TypeError if they are not those of `to_json`."""
        usage = cls(float(values["half_life_s"]))
        usage._at_s = float(values["at_s"])
        usage._used = {Account(user, project): float(used) for user, project, used in values["accounts"]}
        return usage

    def _left(self, age_s: float) -> float:
        return float(2.0 ** (-age_s / self.half_life_s))


@dataclass(frozen=True)
class FairShare:
    policy: SharePolicy
    usage: Usage

    def loads(self, accounts: Iterable[Account], now_s: float) -> Mapping[Account, float]:
        """Return usage/share of each account, of which 2^-load is the factor: the least load is first. It is the sum
        of those of its user and, if a project has a share, of its project."""
        used, accounts = self.usage.at(now_s), set(accounts)
        known = accounts | set(used)
        by_user = self._parts({one: one.user or "" for one in known}, used)
        if not any(name.startswith(PROJECT) for name in self.policy.shares):
            return {one: by_user[one] for one in accounts}
        by_project = self._parts({one: PROJECT + (one.project or "") for one in known}, used)
        return {one: by_user[one] + by_project[one] for one in accounts}

    def _parts(self, names: Mapping[Account, str], used: Mapping[Account, float]) -> Mapping[Account, float]:
        """Return usage/share of the name of each account, both as parts of their sums."""
        shares = {name: self.policy.shares.get(name, 1.0) for name in names.values()}
        sums = dict.fromkeys(shares, 0.0)
        for account, seconds in used.items():
            sums[names[account]] += seconds
        unit = (sum(sums.values()) or 1.0) / (sum(shares.values()) or 1.0)
        return {account: sums[name] / shares[name] / unit for account, name in names.items()}

    def used_by_name(self, now_s: float) -> Mapping[str, float]:
        """Return the decayed device-seconds of each name that has a quota."""
        sums = dict.fromkeys(self.policy.quotas, 0.0)
        for account, seconds in self.usage.at(now_s).items():
            for name in account.names:
                if name in sums:
                    sums[name] += seconds
        return sums
