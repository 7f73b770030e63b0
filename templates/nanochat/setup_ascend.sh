# Set the variables of CANN in this shell: source setup_ascend.sh
# Jobs of `ascendrun submit` do this by `setup:` in the job file.

for ascend_env in "${ASCEND_HOME:-/usr/local/Ascend}/ascend-toolkit/set_env.sh" /usr/local/Ascend/ascend-toolkit/set_env.sh; do
    if [ -f "$ascend_env" ]; then
        # shellcheck disable=SC1090
        . "$ascend_env"
        break
    fi
done
if [ -z "${ASCEND_HOME_PATH:-}${ASCEND_TOOLKIT_HOME:-}" ]; then
    echo "warning: CANN not found; set ASCEND_HOME to the directory that has ascend-toolkit" >&2
fi
unset ascend_env

# Levels are 0 debug, 1 info, 2 warning, 3 error, 4 none. 0 and 1 slow training and fill the disk.
export ASCEND_GLOBAL_LOG_LEVEL="${ASCEND_GLOBAL_LOG_LEVEL:-3}"
# Ranks that load data or compile wait longer than the 120 s of HCCL.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"
# This reduces fragmentation of memory. ASCEND_LAUNCH_BLOCKING=1 does not: it runs each operator alone, for debugging.
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
# ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 selects NPUs; without it all of the machine are used.
