"""Texts of the dashboard's templates, by their names there."""

from __future__ import annotations

from collections.abc import Mapping

from ascendrun.text import Text

LABELS: Mapping[str, Text] = {
    "overview": Text("dashboard.overview", "Overview"),
    "nodes": Text("dashboard.nodes", "Nodes"),
    "jobs": Text("dashboard.jobs", "Jobs"),
    "queue": Text("dashboard.queue", "Queue"),
    "ended": Text("dashboard.ended", "Ended jobs"),
    "attention": Text("dashboard.attention", "Needs attention"),
    "calm": Text("dashboard.calm", "Nothing needs attention."),
    "no_jobs": Text("dashboard.no-jobs", "No job runs."),
    "no_queue": Text("dashboard.no-queue", "No job waits."),
    "no_nodes": Text("dashboard.no-nodes", "No node is known. Submit a job, or start the dashboard with --hostfile."),
    "job": Text("dashboard.job", "job"),
    "state": Text("dashboard.state", "state"),
    "progress": Text("dashboard.progress", "progress"),
    "step": Text("dashboard.step", "step"),
    "left": Text("dashboard.left", "time left"),
    "ran": Text("dashboard.ran", "ran"),
    "reason": Text("dashboard.reason", "reason"),
    "hosts": Text("dashboard.hosts", "nodes"),
    "hint": Text("dashboard.hint", "hint"),
    "error": Text("dashboard.error", "Error"),
    "stale": Text("dashboard.stale", "No connection to the dashboard. The values are those of the last update."),
    "cells": Text(
        "dashboard.cells", "Each cell is a device: utilisation in percent, or – if it was not observed in 15 s."
    ),
    "not_now": Text("dashboard.not-now", "not observed now"),
    "api_about": Text(
        "dashboard.api-about", "Each path returns the JSON that the command prints. The schema is in /api/openapi.json."
    ),
    "attempt": Text("dashboard.attempt", "attempt"),
    "attempts": Text("dashboard.attempts", "Attempts"),
    "diagnosis": Text("dashboard.diagnosis", "Why it failed"),
    "preliminary": Text("dashboard.preliminary", "preliminary: the diagnosis is not finished"),
    "ranks_over_time": Text("dashboard.ranks-over-time", "Ranks over time"),
    "heat_load": Text("dashboard.heat-load", "utilisation: one line per rank, 0 to 100%"),
    "heat_step": Text("dashboard.heat-step", "step time compared with the median of all ranks; red: 30% longer"),
    "no_data": Text("dashboard.no-data", "No data."),
    "curves": Text("dashboard.curves", "Curves"),
    "smooth": Text("dashboard.smooth", "smooth"),
    "started": Text("dashboard.started", "started"),
    "ended_at": Text("dashboard.ended-at", "ended"),
    "steps": Text("dashboard.steps", "steps"),
    "resumed": Text("dashboard.resumed", "resumed from checkpoint at step"),
    "lost_steps": Text("dashboard.lost-steps", "steps lost"),
    "cause": Text("dashboard.cause", "cause"),
    "node": Text("dashboard.node", "node"),
    "liveness": Text("dashboard.liveness", "liveness"),
    "phase": Text("dashboard.phase", "phase"),
    "ranks": Text("dashboard.ranks", "ranks"),
    "events": Text("dashboard.events", "Events"),
    "outputs": Text("dashboard.outputs", "Outputs"),
    "no_outputs": Text("dashboard.no-outputs", "No outputs on this machine."),
    "logs": Text("dashboard.logs", "Logs"),
    "level": Text("dashboard.level", "level"),
    "level_all": Text("dashboard.level-all", "all"),
    "level_error": Text("dashboard.level-error", "errors"),
    "text": Text("dashboard.text", "contains"),
    "from_time": Text("dashboard.from-time", "from"),
    "show": Text("dashboard.show", "Show"),
    "later": Text("dashboard.later", "Later lines"),
    "no_lines": Text("dashboard.no-lines", "No lines."),
    "search_cut": Text("dashboard.search-cut", "The search ended early, since the log is long. Set a time or ranks."),
    "path": Text("dashboard.path", "path"),
    "command": Text("dashboard.command", "command"),
    "parameters": Text("dashboard.parameters", "parameters"),
}
