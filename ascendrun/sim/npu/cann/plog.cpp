// CANN's two ways to tell of trouble: plog files below ~/ascend/log, and the message that aclGetRecentErrMsg gives.
#include "acl/acl.h"
#include "sim.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>

namespace sim {

static std::mutex lock;
static std::string recent;

static std::string moment(const char *between) {
    timeval now;
    gettimeofday(&now, nullptr);
    tm parts;
    localtime_r(&now.tv_sec, &parts);
    char text[64], whole[96];
    strftime(text, sizeof text, between, &parts);
    snprintf(whole, sizeof whole, "%s.%03ld.%03ld", text, long(now.tv_usec / 1000), long(now.tv_usec % 1000));
    return whole;
}

static void make_folders(const std::string &path) {
    for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1))
        mkdir(path.substr(0, at).c_str(), 0750);
}

// ~/ascend/log/KIND/plog/plog-PID_TIME.log, made with the first line; null where it cannot be.
static FILE *open_log(const char *kind) {
    const char *own = getenv("ASCEND_PROCESS_LOG_PATH"), *home = getenv("HOME");
    std::string root = own && *own ? own : std::string(home ? home : "/root") + "/ascend/log";
    timeval now;
    gettimeofday(&now, nullptr);
    tm parts;
    localtime_r(&now.tv_sec, &parts);
    char name[128], stamp[32];
    strftime(stamp, sizeof stamp, "%Y%m%d%H%M%S", &parts);
    snprintf(name, sizeof name, "/%s/plog/plog-%d_%s%03ld.log", kind, getpid(), stamp, long(now.tv_usec / 1000));
    make_folders(root + name);
    return fopen((root + name).c_str(), "ae");
}

static void write_line(const char *kind, FILE *&file, int &owner, const char *level, const char *module,
                       const char *source, int line, const char *format, va_list values) {
    std::lock_guard<std::mutex> guard(lock);
    if (owner != getpid()) {  // a forked child has a log of its own
        owner = getpid();
        file = open_log(kind);
    }
    if (!file) return;
    fprintf(file, "[%s] %s(%d,%s):%s [%s:%d] [%ld]", level, module, getpid(), program_invocation_short_name,
            moment("%Y-%m-%d-%H:%M:%S").c_str(), source, line, long(syscall(SYS_gettid)));
    vfprintf(file, format, values);
    fputc('\n', file);
    fflush(file);
}

void log_error(const char *module, const char *source, int line, const char *format, ...) {
    static FILE *file = nullptr;
    static int owner = 0;
    va_list values;
    va_start(values, format);
    write_line("debug", file, owner, "ERROR", module, source, line, format, values);
    va_end(values);
}

void log_run(const char *module, const char *source, int line, const char *format, ...) {
    static FILE *file = nullptr;
    static int owner = 0;
    va_list values;
    va_start(values, format);
    write_line("run", file, owner, "INFO", module, source, line, format, values);
    va_end(values);
}

void report(const char *code, const std::string &text) {
    log_error(code[1] == 'I' ? "HCCL" : "RUNTIME", "error_manager.cc", 291, "%s: %s", code, text.c_str());
    std::string line = std::string(code) + ": [PID: " + std::to_string(getpid()) + "] " + moment("%Y-%m-%d-%H:%M:%S") +
                       " " + text + "\n";
    std::lock_guard<std::mutex> guard(lock);
    recent += line;
}

}  // namespace sim

extern "C" const char *aclGetRecentErrMsg() {
    static thread_local std::string given;
    std::lock_guard<std::mutex> guard(sim::lock);
    given.swap(sim::recent);
    sim::recent.clear();
    return given.c_str();
}

extern "C" void aclAppLog(aclLogLevel level, const char *function, const char *file, uint32_t line, const char *format, ...) {
    (void)level, (void)function, (void)file, (void)line, (void)format;  // torch_npu's own chatter
}
