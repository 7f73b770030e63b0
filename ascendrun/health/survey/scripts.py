"""Small programs that run on a node, in the job's shell; the last line of each is JSON."""

from __future__ import annotations

MODULES = (
    "torch", "torch-npu", "numpy", "transformers", "accelerate", "peft", "deepspeed", "safetensors", "tokenizers",
    "lightning",
)  # fmt: skip

# Python 3.7 lacks importlib.metadata: then the versions are unknown.
VERSIONS = f"""
import glob, json, os, platform, sys, time
modules = {{}}
try:
    from importlib import metadata
    for name in {MODULES!r}:
        try:
            modules[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            modules[name] = None
except ImportError:
    modules = None
cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
builds = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
locks = {{}}
for path in (glob.glob(os.path.join(builds, "*", "lock")) + glob.glob(os.path.join(builds, "*", "*", "lock")))[:20]:
    try:
        locks[os.path.realpath(path)] = time.time() - os.stat(path).st_mtime
    except OSError:
        pass
for path in glob.glob("/proc/[0-9]*/fd/*") if locks else ():
    try:
        if os.readlink(path) in locks:
            locks[os.readlink(path)] = None
    except OSError:
        pass
print(json.dumps({{"executable": sys.executable, "version": platform.python_version(), "prefix": sys.prefix,
                  "modules": modules, "locks": locks}}))
"""

TORCH = """
import json, sys, time
device_type, began = sys.argv[1], time.monotonic()
found = {"step": "import torch"}
try:
    import torch
    found["torch"] = torch.__version__
    if device_type == "npu":
        found["step"] = "import torch_npu"
        import torch_npu
        found["torch_npu"] = torch_npu.__version__
    found["import_s"] = time.monotonic() - began
    if device_type in ("npu", "cuda"):
        found["step"] = "torch.%s.device_count()" % device_type
        found["devices"] = getattr(torch, device_type).device_count()
    found["step"] = "torch.distributed"
    backend = {"npu": "hccl", "cuda": "nccl"}.get(device_type, "gloo")
    found["backend"] = backend
    found["has_backend"] = torch.distributed.is_available() and torch.distributed.is_backend_available(backend)
    found["step"] = None
except BaseException as error:  # an import may end with any exception
    found["error"] = (type(error).__name__ + ": " + str(error))[:2000]
print()
print(json.dumps(found))
"""

# sshd -T reads the host keys, so it requires root; other users read the files themselves, if permitted. A sshd
# that was started with a separate configuration (-f) has it in its process title.
SSHD = """
pid=$(cat /run/sshd.pid 2>/dev/null || cat /var/run/sshd.pid 2>/dev/null) &&
    config=$(tr '\\0' ' ' < /proc/$pid/cmdline 2>/dev/null | sed -n 's/.* -f *\\([^ ]*\\).*/\\1/p')
for p in sshd /usr/sbin/sshd /usr/local/sbin/sshd; do
    command -v $p >/dev/null 2>&1 || continue
    $p -T ${config:+-f "$config"} 2>/dev/null | grep -iE '^(maxstartups|maxsessions) ' && exit 0
done
cd /etc/ssh 2>/dev/null && cat sshd_config sshd_config.d/*.conf 2>/dev/null | grep -iE '^ *(maxstartups|maxsessions) '
exit 0
"""
