// What the parts of the simulated CANN know of each other.
#pragma once

#include <cstdint>
#include <string>

namespace sim {

// --- settings.cpp ---
int device_count();
const std::string &chip();
size_t memory_bytes();                                    // of one device
int number_of(const char *variable, int otherwise);       // a whole number from the environment
double waits_s(double seconds);                           // how long a wait of CANN's lasts here
int rank_of_process();                                    // RANK, 0 where there is none

// --- plog.cpp ---
void log_error(const char *module, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));
void log_run(const char *module, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));
// "EI0002: [PID: 7] 2026-01-02-03:04:05.006.007 text": what aclGetRecentErrMsg tells next, and a line of the log.
void report(const char *code, const std::string &text);

// --- faults.cpp ---
// Whether the fault of this name has come over this process; `collective`: how many it has begun.
bool has_fault(const char *name);
void count_collective();

// --- devices.cpp ---
int current_device();
// The return code that every call of this process to its device gives from now on; 0: the device is fine.
int device_error();
void break_device(int code);

}  // namespace sim
