"""Kubernetes: pods that wait for each job, reached by kubectl exec, their supervisors started by a holder."""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

from ascendrun.backends import held
from ascendrun.backends.kubernetes import manifests, states
from ascendrun.core.allocations import (
    AllocationRequest,
    AllocationState,
    EngineError,
    EngineFacts,
    Gone,
    Options,
    Waiting,
)
from ascendrun.core.engines import read_engines
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.reasons import because
from ascendrun.core.settings import Settings
from ascendrun.head.ssh.child_process import ChildConnection
from ascendrun.node import hold

QUOTA_S = 30.0
"""Seconds until a request that a quota refused is made again."""
_REFUSED = re.compile(
    r"error validating|strict decoding|unknown field|\((BadRequest|Invalid|Forbidden|NotFound)\)|is invalid"
    "|no matches for|have a resource type|does not exist|no context exists"
)
"""What kubectl prints for a request that would be refused again; its exit code is 1 for everything."""
_NO_ERRORS = ("AlreadyExists", "does not support dry run")
"""Of a request that was made before, and of an admission webhook with side effects."""


class Place(NamedTuple):
    """Where the pods of an engine are; as text it is the `allocation` of a host."""

    namespace: str
    context: str

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Place:
        return cls(options["namespace"], options["context"])

    def __str__(self) -> str:
        return f"{self.namespace}@{self.context}"

    @property
    def argv(self) -> list[str]:
        return ["kubectl", f"--context={self.context}", f"--namespace={self.namespace}"]


class KubernetesBackend:
    """Implementation of `transport.Backend` and `allocations.Allocator`. Thread-safe: only one thread at a time uses
    the allocator of an engine."""

    def __init__(self, settings: Settings, options: object = None) -> None:
        self._settings = settings
        self._gone: dict[str, Gone] = {}
        self._seen: set[str] = set()
        self._nodes: dict[str, str] = {}
        self._held: dict[str, tuple[float, Waiting]] = {}
        self._may_connect: set[Place] = set()

    def connect(self, host: Host) -> ChildConnection:
        """Return a connection of which each command is an exec into the pod."""
        connection = held.connect(host, exec_argv)
        connection.peer_address = host.addr
        return connection

    def close(self) -> None:
        """Nothing is held."""

    def terminal_argv(self, host: Host, argv: Sequence[str], *, has_terminal: bool) -> list[str]:
        return exec_argv(host, argv, has_terminal=has_terminal)

    def request(self, wanted: AllocationRequest) -> Waiting | None:
        until_mono, held = self._held.get(wanted.key, (0.0, None))
        if held is not None and time.monotonic() < until_mono:
            return held
        place = Place.of(wanted.options)
        self._require_connect(place)
        with open(hold.__file__, encoding="utf-8") as file:
            holder = file.read()
        objects = manifests.objects_of(
            wanted,
            holder=holder,
            idle_s=float(os.environ.get(hold.IDLE_VARIABLE, hold.IDLE_S)),
            template=_read_template(wanted.options.get("template")),
            avoided=sorted(filter(None, {self._nodes.get(name) for name in wanted.exclude})),
        )
        try:
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
            _require_known_fields(place, objects, text)
            run(place, ["create", "--validate=true", "--filename=-"], text)
        except EngineError as error:
            self._delete(place, [wanted.options["kind"]], [wanted.key])
            if error.reason.code != "kubernetes-quota":
                raise
            self._held[wanted.key] = (time.monotonic() + QUOTA_S, Waiting(error.reason))
            return Waiting(error.reason)
        return None

    def poll(self, keys: Options) -> Mapping[str, AllocationState]:
        found: dict[str, AllocationState] = {}
        for place, kinds, its in _by_place(keys):
            items = states.by_key(_list(place, kinds, f"{manifests.KEY} in ({','.join(its)})"))
            for key in its:
                state = self._state(place, items.get(key, ()), key)
                if state is not None:
                    found[key] = state
            ending = [key for key in its if key in self._gone and items.get(key)]
            self._delete(place, kinds, ending)
        return found

    def _state(self, place: Place, items: Sequence[Mapping[str, Any]], key: str) -> AllocationState | None:
        """Return the state of an allocation. One that has lost a pod is gone when the others have ended too."""
        now_s = time.time()
        live = [item for item in items if not states.is_late(item, now_s)]
        if live:
            self._seen.add(key)
            self._nodes.update((states.name_of(item), item["spec"].get("nodeName", "")) for item in live)
            state = states.state_of(live, place=str(place))
            if isinstance(state, Gone):
                self._gone.setdefault(key, state)
            return Waiting(self._gone[key].reason) if key in self._gone else state
        if items or key in self._seen:
            self._seen.discard(key)
            why = because("kubernetes-late", pods=[states.name_of(item) for item in items])
            lost = Gone("node-failed", why if items else because("kubernetes-deleted", count=0))
            return self._gone.pop(key, lost)
        return None

    def all_of(self, prefix: str) -> Mapping[str, AllocationState]:
        found: dict[str, AllocationState] = {}
        for options in read_engines(self._settings).values():
            if options["type"] == "kubernetes":
                place, items = str(Place.of(options)), _all_of(options)
                its = {key: one for key, one in items.items() if key.startswith(prefix)}
                found.update((key, states.state_of(one, place=place)) for key, one in its.items())
        return found

    def release(self, keys: Options) -> None:
        for place, kinds, its in _by_place(keys):
            for key in its:
                self._gone.setdefault(key, Gone("cancelled", because("kubernetes-released")))
                self._seen.add(key)
            self._delete(place, kinds, its)

    def prune(self, options: Mapping[str, Any], is_over: Callable[[str], bool], *, dry_run: bool) -> Sequence[str]:
        place, kind, items = Place.of(options), options["kind"], _all_of(options)
        keys = [key for key, its in items.items() if states.is_over(its) or is_over(key)]
        if not dry_run:
            self._delete(place, [kind], keys)
        return [states.name_of(item) for key in keys for item in items[key]]

    def facts(self, options: Mapping[str, Any]) -> EngineFacts:
        place = Place.of(options)
        self._require_connect(place)
        for resource in _resources([options["kind"]]).split(","):
            for verb in ("create", "list", "delete", "deletecollection"):
                _require_right(place, verb, resource)
        return EngineFacts(nodes=1)

    def _require_connect(self, place: Place) -> None:
        """Ask once whether exec is permitted: without it the pods would wait for nobody."""
        if place not in self._may_connect:
            _require_right(place, "create", "pods", "--subresource=exec")
            self._may_connect.add(place)

    def _delete(self, place: Place, kinds: Collection[str], keys: Collection[str]) -> None:
        if keys:
            label = f"{manifests.KEY} in ({','.join(keys)})"
            run(place, ["delete", _resources(kinds), f"--selector={label}", "--wait=false", "--ignore-not-found"])


def run(place: Place, argv: Sequence[str], text: str = "") -> str:
    """Run a kubectl; return its output. Raises EngineError."""
    done = held.run_command([*place.argv, *argv], text, verb=argv[0])
    lines = [line for line in done.stderr.splitlines() if not any(mark in line for mark in _NO_ERRORS)]
    if done.returncode and lines:  # without any, the answer is on the other stream
        raise error_of(" ".join(lines[:3]))
    return done.stdout


def _require_known_fields(place: Place, objects: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raises EngineError if the API server would drop fields of the objects. kubectl compares only with schemas that
    are published, which may be later than the resource is."""
    argv = ["create", "--validate=true", "--dry-run=server", "--output=json", "--filename=-"]
    try:
        answered = list(_documents(run(place, argv, text)))
    except ValueError as error:
        raise EngineError(because("engine-silent", why=f"kubectl create: {error}")) from error
    kept = {(one["kind"], one["metadata"]["name"]): one for one in answered}
    for one in objects:
        fields = list(manifests.dropped(one, kept.get((one["kind"], one["metadata"]["name"]))))
        if fields:
            raise EngineError(because("kubernetes-unknown-fields", kind=one["kind"], fields=fields), is_final=True)


def _documents(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects that kubectl create prints, one after the other."""
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        found, at = decoder.raw_decode(text, len(text) - len(text[at:].lstrip()))
        yield found


def error_of(why: str) -> EngineError:
    """Return what a kubectl that failed says."""
    if "exceeded quota" in why:
        return EngineError(because("kubernetes-quota", why=why))
    if not _REFUSED.search(why):
        return EngineError(because("engine-silent", why=why))
    code = "kubernetes-forbidden" if "(Forbidden)" in why else "kubernetes-invalid"
    return EngineError(because(code, why=why), is_final=True)


def exec_argv(host: Host, command: Sequence[str], *, has_terminal: bool = False) -> list[str]:
    """Return the command line that runs a command in the pod of a host."""
    place = Place(*str(host.allocation).split("@", 1))
    flags = ["--stdin", *(["--tty"] if has_terminal else [])]
    return [*place.argv, "exec", *flags, f"--container={manifests.CONTAINER}", host.name, "--", *command]


def _by_place(keys: Options) -> Iterator[tuple[Place, list[str], list[str]]]:
    """Yield each place with the kinds and the keys of its allocations."""
    found: dict[Place, list[str]] = defaultdict(list)
    for key, options in keys.items():
        found[Place.of(options)].append(key)
    for place, its in found.items():
        yield place, sorted({keys[key]["kind"] for key in its}), its


def _list(place: Place, kinds: Collection[str], selector: str) -> list[dict[str, Any]]:
    text = run(place, ["get", _resources(kinds), f"--selector={selector}", "--output=json"])
    try:
        return list(json.loads(text)["items"])
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(because("engine-silent", why=f"kubectl get: {error}")) from error


def _all_of(options: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the objects of every allocation of any head where an engine of the settings has its pods."""
    return states.by_key(_list(Place.of(options), [options["kind"]], "=".join(*manifests.MANAGED.items())))


def _resources(kinds: Collection[str]) -> str:
    return ",".join(["pods", *(manifests.RESOURCES[kind] for kind in kinds if kind in manifests.RESOURCES)])


def _require_right(place: Place, verb: str, resource: str, *flags: str) -> None:
    if not run(place, ["auth", "can-i", verb, resource, *flags]).startswith("yes"):
        right = f"{verb} {resource}{'/exec' if flags else ''}"
        raise EngineError(because("kubernetes-no-right", right=right, namespace=place.namespace), is_final=True)


def _read_template(path: str | None) -> Mapping[str, Any]:
    import yaml

    if path is None:
        return {}
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EngineError(because("kubernetes-template", path=path, why=str(error)), is_final=True) from error
    return found if isinstance(found, Mapping) else {}
