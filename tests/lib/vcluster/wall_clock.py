"""A library that shifts the wall clock of the programs that load it, and nothing else.

libfaketime also shifts how long programs sleep by the monotonic clock: there `time.sleep` of Python fails with EINVAL.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.lib.vcluster.requirements import NotSupportedError

SHIFT_VARIABLE = "VCLUSTER_CLOCK_S"
"""Seconds, as text, in the environment of a program that loads the library."""
SOURCE = r"""
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *at)
{
    int failed = syscall(SYS_clock_gettime, clock, at);
    const char *shift = getenv(SHIFT_VARIABLE);
    if (!failed && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long long ns = at->tv_nsec + llround(strtod(shift, NULL) * 1e9);
        at->tv_sec += ns / 1000000000 - (ns % 1000000000 < 0);
        at->tv_nsec = (ns % 1000000000 + 1000000000) % 1000000000;
    }
    return failed;
}

int timespec_get(struct timespec *at, int base)
{
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, at) ? base : 0;
}

int gettimeofday(struct timeval *at, void *zone)
{
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    if (!failed) {
        at->tv_sec = now.tv_sec;
        at->tv_usec = now.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *at)
{
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
"""


def build(target: Path) -> None:
    """Write the library to `target`. Raises NotSupportedError without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotSupportedError("a separate clock for a host requires a C compiler", hint="apt-get install -y gcc")
    variable = f'-DSHIFT_VARIABLE="{SHIFT_VARIABLE}"'
    argv = [compiler, "-shared", "-fPIC", "-O1", variable, "-x", "c", "-", "-o", str(target), "-lm"]
    done = subprocess.run(argv, input=SOURCE, capture_output=True, text=True)
    if done.returncode:
        raise NotSupportedError(f"the library of a separate clock does not compile: {done.stderr.strip()[-500:]}")
