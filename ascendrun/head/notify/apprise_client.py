"""Delivery to the services of Apprise: mail, Telegram, Teams and others that ascendrun has no format for."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from ascendrun.core.notice_formats import DeliveryResult
from ascendrun.core.notices import Notice, Target, describe
from ascendrun.text import Text


def deliver_by_apprise(notice: Notice, target: Target, url: str) -> DeliveryResult:
    """Try once. Apprise reports only whether a service accepted it; what it logs may contain credentials and is
    dropped."""
    try:
        apprise: Any = import_module("apprise")  # 40 MB and 0.3 s, for those who use it
    except ImportError:
        message = Text("notice.no-apprise", "apprise is not installed: run `pip install 'ascendrun[notify]'`")
        return DeliveryResult("refused", message)
    logging.getLogger("apprise").disabled = True
    sender = apprise.Apprise()
    if not sender.add(url):
        return DeliveryResult("refused", Text("notice.apprise-url", "Apprise does not accept the URL"))
    words = describe(notice, target.language)
    kind = apprise.NotifyType.FAILURE if words.is_bad else apprise.NotifyType.INFO
    body = "\n".join(f"{name}: {value}" for name, value in words.facts)
    if sender.notify(title=words.title, body=body, notify_type=kind, body_format=apprise.NotifyFormat.TEXT):
        return DeliveryResult("delivered", Text("notice.apprise-sent", "sent by Apprise"))
    return DeliveryResult("retry", Text("notice.apprise-failed", "Apprise reports that the service did not accept it"))
