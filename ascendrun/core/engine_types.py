"""The types of engines, as models of their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Optional, Tuple

from pydantic import Field

from ascendrun.core.reader.strict import MOUNT_PATTERN, Name, Texts


class Site(Texts):
    """An engine, and what its site adds to a job; values of the job win."""

    runs_images: ClassVar[bool] = False
    """Its hosts are containers: those of a job run its image, and start none."""

    name: Optional[Name] = None
    """Its name in the settings."""
    env: Mapping[str, str] = Field(default_factory=dict, examples=[{"HCCL_CONNECT_TIMEOUT": "1200"}])
    setup: Optional[str] = Field(None, examples=["source /usr/local/Ascend/ascend-toolkit/set_env.sh"])
    python: Optional[str] = Field(None, examples=["/opt/conda/bin/python"])


class SiteOfNodes(Site):
    """An engine on whose nodes a job may start containers."""

    image: Optional[str] = Field(None, examples=["quay.io/ascend/cann:8.3"])
    runtime: Optional[Literal["docker", "podman", "apptainer"]] = Field(None, examples=["podman"])
    mounts: Tuple[Annotated[str, Field(pattern=MOUNT_PATTERN)], ...] = Field((), examples=[["/data:/data:ro"]])


class SshEngine(SiteOfNodes):
    """Hosts of a hostfile."""

    type: Literal["ssh"] = Field(examples=["ssh"])
    hostfile: str = Field(examples=["cluster.hosts"])


class SlurmEngine(SiteOfNodes):
    """A Slurm cluster, on whose login node the head runs."""

    type: Literal["slurm"] = Field(examples=["slurm"])
    partition: Optional[str] = Field(None, examples=["npu"])
    account: Optional[str] = Field(None, examples=["llm"])
    qos: Optional[str] = Field(None, examples=["normal"])
    time: Optional[str] = Field(None, examples=["1-00:00:00"])
    constraint: Optional[str] = Field(None, examples=["910b"])
    reservation: Optional[str] = Field(None, examples=["maintenance"])
    exclude: Optional[str] = Field(None, examples=["npu[03-04]"])
    gres: str = Field("npu", examples=["npu:910b"])
    options: Tuple[str, ...] = Field((), examples=[["--exclusive", "--mem=0"]])


class KubernetesEngine(Site):
    """A Kubernetes cluster that kubectl reaches from the head."""

    runs_images = True

    type: Literal["kubernetes"] = Field(examples=["kubernetes"])
    context: str = Field(examples=["prod"])
    namespace: str = Field("default", examples=["train"])
    kind: Literal["pods", "vcjob", "ascendjob"] = Field("pods", examples=["vcjob"])
    image: Optional[str] = Field(None, examples=["quay.io/ascend/cann:8.3"])
    mounts: Tuple[Annotated[str, Field(pattern=r"^(pvc:[a-z0-9.-]+|emptydir|/[^:]*):/[^:]*(:ro|:rw)?$")], ...] = Field(
        (), examples=[["pvc:data:/data"]]
    )
    resource: Optional[str] = Field(None, examples=["example.com/npu"])
    queue: Optional[str] = Field(None, examples=["default"])
    priority_class: Optional[str] = Field(None, examples=["training"])
    template: Optional[str] = Field(None, examples=["pod.yaml"])


ENGINE_TYPES: Mapping[str, type[Site]] = {"kubernetes": KubernetesEngine, "ssh": SshEngine, "slurm": SlurmEngine}
