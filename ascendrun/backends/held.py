"""How a connection runs its commands by the holder of its host (node/hold.py), in the engines that start one."""

LINK = """\
d=/tmp/ascendrun-hold-$(id -u); f=$d/$ASCENDRUN_HOLDER.py; n=0
until [ -s "$f" ] || [ $n -ge 200 ]; do sleep 0.1; n=$((n+1)); done
if [ -O "$d" ] && [ -O "$f" ] && IFS= read -r p <"$f"; then exec "${p#?}" -I -S "$f" "$ASCENDRUN_HOLDER" "$0"; fi
exec /bin/sh -c "$0"
"""
"""Script that runs a command, its $0, by the holder, for which it waits; without a holder, itself."""
