"""Small programs that run on a node: for the job's shell, where the last line is JSON, and for its device tools.

A device script prints sections: `@@ <label>`, the command's output, and `@@= <exit code>` on a separate line, or no end
if the command did not return. `read_sections` parses them. A simulated node that shares its machine with others is in
$ASCENDRUN_SIM_ROOT: no real device is read there.
"""

from __future__ import annotations

from typing import NamedTuple

MODULES = (
    "torch", "torch-npu", "numpy", "transformers", "accelerate", "peft", "deepspeed", "safetensors", "tokenizers",
    "lightning", "ray", "trl", "datasets", "huggingface-hub", "diffusers", "vllm", "vllm-ascend", "triton-ascend",
)  # fmt: skip

# importlib.metadata finds the same versions, but importing it takes 40 ms of CPU, on each host at every start.
VERSIONS = f"""
import json, os, sys, time
modules = dict.fromkeys({MODULES!r})
for place in reversed(sys.path):
    try:
        entries = sorted(os.listdir(place or "."))
    except OSError:
        continue
    for entry in entries:
        if not entry.endswith((".dist-info", ".egg-info")):
            continue
        name = entry.rpartition(".")[0].partition("-")[0].lower().replace("_", "-").replace(".", "-")
        if name not in modules:
            continue
        path = os.path.join(place, entry)
        for file in [path, *(os.path.join(path, kind) for kind in ("METADATA", "PKG-INFO"))]:
            try:
                with open(file, encoding="utf-8", errors="replace") as lines:
                    modules[name] = next(line[8:].strip() for line in lines if line.startswith("Version:"))
            except (OSError, StopIteration):
                pass
cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
builds = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
locks = {{}}
if os.path.isdir(builds):
    import glob
    found = glob.glob(os.path.join(builds, "*", "lock")) + glob.glob(os.path.join(builds, "*", "*", "lock"))
    for path in found[:20]:
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
print(json.dumps({{"executable": sys.executable, "version": sys.version.split()[0], "prefix": sys.prefix,
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
pid=
{ read -r pid < /run/sshd.pid || read -r pid < /var/run/sshd.pid; } 2>/dev/null
[ -n "$pid" ] && config=$(tr '\\0' ' ' < /proc/$pid/cmdline 2>/dev/null | sed -n 's/.* -f *\\([^ ]*\\).*/\\1/p')
for p in sshd /usr/sbin/sshd /usr/local/sbin/sshd; do
    command -v $p >/dev/null 2>&1 || continue
    $p -T ${config:+-f "$config"} 2>/dev/null | grep -iE '^(maxstartups|maxsessions) ' && exit 0
done
cd /etc/ssh 2>/dev/null && cat sshd_config sshd_config.d/*.conf 2>/dev/null | grep -iE '^ *(maxstartups|maxsessions) '
exit 0
"""


# ---------------------------------------------------------------- device tools

# Only builtins of the shell: each $(…) is a process, on every host at every start and in every sample. `find_tool` sets
# `t`, to "" if there is no such tool.
_SECTION = r"""
section() { printf '@@ %s\n' "$1"; shift; "$@" 2>&1; printf '\n@@= %s\n' $?; }
r=${ASCENDRUN_SIM_ROOT:-}
ascend=$r/usr/local/Ascend
if [ -r "$r/etc/ascend_install.info" ]; then
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in Driver_Install_Path_Param=?*) ascend=${line#*=} ;; esac
    done <"$r/etc/ascend_install.info"
fi
find_tool() {
    t=
    before=$IFS
    IFS=:
    set -f
    for d in $PATH "$ascend/driver/tools" /usr/local/Ascend/driver/tools /usr/local/bin /usr/local/sbin; do
        [ -f "$d/$1" ] && [ -x "$d/$1" ] && { t=$d/$1; break; }
    done
    set +f
    IFS=$before
}
"""

_OWNER = r"""
    u=$(stat -c %U "/proc/$p" 2>/dev/null) || continue
    g=$({ tr '\0' '\n' <"/proc/$p/environ" | sed -n 's/^ASCENDRUN_RUN_ID=//p'; } 2>/dev/null)
    c=$({ tr '\0\n\t' '   ' <"/proc/$p/cmdline" | cut -c1-200; } 2>/dev/null)
    printf '%s\t%s\t%s\t%s\n' "$p" "$u" "$g" "$c"
done
printf '\n@@= 0\n'
"""

# The table, and for every process in it: pid, user, run id of an ascendrun job, command. A pid without a line is not
# visible here.
TABLE = (
    _SECTION
    + r"""
find_tool npu-smi
[ -n "$t" ] || { section none true; exit 0; }
echo '@@ info'
o=$("$t" info 2>&1; echo "x$?")
printf '%s\n@@= %s\n' "${o%x*}" "${o##*x}"
echo '@@ owners'
for p in $(printf '%s' "$o" | sed -n 's/^| *[0-9][0-9 ]*| *\([0-9][0-9]*\) *|.*/\1/p' | sort -un); do
"""
    + _OWNER
)

# The GPUs, the processes that compute on them, and for each visible process its line as above.
GPUS = (
    _SECTION
    + r"""
[ -z "$r" ] && command -v nvidia-smi >/dev/null || { section none true; exit 0; }
section gpus nvidia-smi --query-gpu=index,pci.bus_id --format=csv
echo '@@ apps'
o=$(nvidia-smi --query-compute-apps=gpu_bus_id,pid,used_memory --format=csv 2>&1; echo "x$?")
printf '%s\n@@= %s\n' "${o%x*}" "${o##*x}"
echo '@@ owners'
for p in $(printf '%s' "$o" | sed -n 's/^[0-9A-Fa-f:.]*, *\([0-9][0-9]*\),.*/\1/p' | sort -un); do
"""
    + _OWNER
)

# Only the table, as the tool prints it.
INFO = (
    _SECTION
    + r"""
find_tool npu-smi
[ -n "$t" ] || exit 127
exec "$t" info
"""
)

# A hanging call is ended after $seconds, if `timeout` exists; after two of them, the other calls are skipped.
_LIMITED = r"""
k=
command -v timeout >/dev/null && k="timeout -s KILL $seconds"
hung=0
limited() { $k "$@"; c=$?; [ $c -ne 137 ] || hung=$((hung + 1)); return $c; }
"""

# Sequential calls: it is not documented whether these tools may run in parallel.
CARDS = (
    _SECTION
    + "seconds=8"
    + _LIMITED
    + r"""
find_tool npu-smi
[ -n "$t" ] || exit 0
for i in $(limited "$t" info -l 2>/dev/null | sed -n 's/^[[:space:]]*NPU ID *: *\([0-9][0-9]*\).*/\1/p'); do
    for v in "$@"; do
        section "$v $i" limited "$t" info -t "$v" -i "$i"
        [ $hung -lt 2 ] || exit 0
    done
done
exit 0
"""
)

# Each item of all ports before the next item: after a timeout, the more important items exist for all ports.
PORTS = (
    _SECTION
    + "seconds=5"
    + _LIMITED
    + r"""
find_tool hccn_tool
[ -n "$t" ] || exit 0
for v in "$@"; do
    for d in "$r"/dev/davinci[0-9]*; do
        [ -e "$d" ] || continue
        i=${d##*/davinci}
        printf '@@ %s %s\n' "$v" "$i"
        o=$($k "$t" -i "$i" "-$v" -g 2>&1; echo "x$?")
        printf '%s\n@@= %s\n' "${o%x*}" "${o##*x}"
        [ "${o##*x}" -ne 137 ] || hung=$((hung + 1))
        [ "$v" = ip ] && case "$o" in *ipaddr:*) ;; *) section "ip6 $i" limited "$t" -i "$i" -ip -inet6 -g ;; esac
        [ $hung -lt 2 ] || exit 0
    done
done
exit 0
"""
)

# Arguments: device, address, and so on.
PINGS = (
    _SECTION
    + "seconds=10"
    + _LIMITED
    + r"""
find_tool hccn_tool
[ -n "$t" ] || exit 0
while [ $# -ge 2 ] && [ $hung -lt 2 ]; do
    section "ping $1 $2" limited "$t" -i "$1" -ping -g address "$2" pkt 3
    shift 2
done
"""
)

FILES = (
    _SECTION
    + r"""
give() { for f in "$@"; do [ -r "$f" ] && section "$l $f" cat "$f"; done; }
l=install; give "$r/etc/ascend_install.info"
l=hccn; give "$r/etc/hccn.conf"
l=driver; give "$ascend/driver/version.info"
l=firmware; give "$ascend/firmware/version.info"
l=cann; give "$ascend"/cann/*-linux/ascend_toolkit_install.info \
    "$ascend"/ascend-toolkit/latest/*-linux/ascend_toolkit_install.info \
    "$ascend"/nnae/latest/ascend_nnae_install.info "$ascend"/nnae/latest/*-linux/ascend_nnae_install.info
for f in "$ascend"/cann/set_env.sh "$ascend"/ascend-toolkit/set_env.sh "$ascend"/nnae/set_env.sh; do
    [ -r "$f" ] && section "set_env $f" true
done
exit 0
"""
)

# In the job's shell: the CANN in its variables.
CANN = (
    _SECTION
    + r"""
h=${ASCEND_HOME_PATH:-${ASCEND_TOOLKIT_HOME:-${ASCEND_NNAE_HOME:-}}}
[ -n "$h" ] || exit 0
[ -d "$h" ] && section "home $h" true || section "gone $h" true
for f in "$h"/*-linux/ascend_toolkit_install.info "$h"/ascend_nnae_install.info "$h"/*-linux/ascend_nnae_install.info
do
    [ -r "$f" ] && section "cann $f" cat "$f"
done
[ -r "$h/version.cfg" ] && section "components $h/version.cfg" cat "$h/version.cfg"
exit 0
"""
)


# ---------------------------------------------------------------- reading the sections

KILLED = 137
"""`timeout -s KILL` ended it."""

_END = "\n@@= "


class Section(NamedTuple):
    """The output of one command. `labels`: its label; `code` None: it did not end."""

    labels: tuple[str, ...]
    text: str
    code: int | None

    @property
    def hung(self) -> bool:
        return self.code is None or self.code == KILLED


def read_sections(text: str) -> tuple[Section, ...]:
    """Parse sections in the order of the queries; text before the first mark is dropped."""
    found = []
    pieces = ("\n" + text).split("\n@@ ")[1:]
    for place, piece in enumerate(pieces, start=1):
        label, _, body = (piece + "\n" if place < len(pieces) else piece).partition("\n")
        output, _, code = ("\n" + body.rstrip("\n")).rpartition(_END)
        has_ended = code.isascii() and code.isdigit() and len(code) <= 3
        shown = (output[1:], int(code)) if has_ended else (body, None)
        found.append(Section(tuple(label.split(" ", 1)), *shown))
    return tuple(found)
