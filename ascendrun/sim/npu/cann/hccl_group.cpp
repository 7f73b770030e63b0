// How ranks become a communicator: rank 0 tells an address, all come there, and each connects with each.
#include "hccl_group.h"
#include "sim.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>

namespace {

using namespace sim;

constexpr int BASE_PORT = 60000, PORTS = 32;
constexpr double GRACE_S = 20;  // longer than told: time to spread why it failed

struct Root {
    char address[48];
    int port;
    char name[96];
};

struct Hello {
    uint32_t rank;
    Place place;
};

struct Reply {
    char missing[512];  // the ranks that did not come; empty: all did, and their places follow
};

std::mutex lock;
std::map<std::string, int> listeners;  // by the communicator's name

template <typename Value>
Bytes bytes_of(const Value *values, size_t count = 1) {
    auto *start = reinterpret_cast<const char *>(values);
    return Bytes(start, start + count * sizeof(Value));
}

template <typename Value>
bool receive(int socket, Value *values, size_t count, double deadline_s) {
    Bytes bytes(count * sizeof(Value));
    if (!receive_all(socket, bytes, deadline_s)) return false;
    memcpy(values, bytes.data(), bytes.size());
    return true;
}

// Seconds of HCCL_CONNECT_TIMEOUT; negative: it is out of range, and report() has said so.
double connect_timeout_s() {
    int seconds = number_of("HCCL_CONNECT_TIMEOUT", 120);
    if (seconds >= 120 && seconds <= 7200) return seconds;
    report("EI0001", "Environment variable [HCCL_CONNECT_TIMEOUT] is invalid. Reason: it should be a number greater than "
                     "or equal to 120 and less than or equal to 7200.");
    return -1;
}

void tell_settings() {
    const char *source = getenv("HCCL_CONNECT_TIMEOUT") ? "environment" : "default";
    log_run("HCCL", "externalinput.cc", 598, "[HCCL_ENV] HCCL_CONNECT_TIMEOUT set by %s to [%d]s", source, number_of("HCCL_CONNECT_TIMEOUT", 120));
    source = getenv("HCCL_EXEC_TIMEOUT") ? "environment" : "default";
    log_run("HCCL", "externalinput.cc", 558, "[HCCL_ENV] HCCL_EXEC_TIMEOUT set by %s to [%d]s", source, number_of("HCCL_EXEC_TIMEOUT", 1836));
}

// Rank 0: the place of every rank, told to every rank. False: some did not come in time.
bool gather_places(Group &group, double timeout_s, double deadline_s) {
    int listener;
    {
        std::lock_guard<std::mutex> guard(lock);
        listener = listeners[group.name];
        listeners.erase(group.name);
    }
    std::vector<int> sockets(group.size, -1);
    size_t came = 1;
    while (came < group.size) {
        int socket = accept_until(listener, deadline_s);
        if (socket < 0) break;
        Hello hello;
        if (!receive(socket, &hello, 1, deadline_s) || hello.rank >= group.size || sockets[hello.rank] >= 0) {
            close(socket);
            continue;
        }
        sockets[hello.rank] = socket;
        group.places[hello.rank] = hello.place;
        ++came;
    }
    close(listener);
    Reply reply{};
    std::string connected;
    for (uint32_t rank = 0; rank < group.size; ++rank) {
        char number[32];
        snprintf(number, sizeof number, "[%016u],", rank);
        if (rank == 0 || sockets[rank] >= 0) connected += number;
        else if (strlen(reply.missing) + 8 < sizeof reply.missing) strcat(reply.missing, (std::to_string(rank) + ",").c_str());
    }
    for (uint32_t rank = 1; rank < group.size; ++rank) {
        if (sockets[rank] < 0) continue;
        send_all(sockets[rank], bytes_of(&reply), deadline_s + waits_s(GRACE_S));
        if (came == group.size) send_all(sockets[rank], bytes_of(group.places.data(), group.size), deadline_s);
        close(sockets[rank]);
    }
    if (came == group.size) return true;
    int told_s = int(timeout_s);
    log_error("HCCL", "topoinfo_exchange_server.cc", 314, "[InitGroupStage][RanktableDetect]topo exchange server get socket timeout! timeout[%d s]", told_s);
    log_error("HCCL", "topoinfo_exchange_server.cc", 501, "[InitGroupStage][DisplayConnectionedRank]total connected num is [%zu],line num is [1]", came);
    log_error("HCCL", "topoinfo_exchange_server.cc", 503, "[InitGroupStage][DisplayConnectionedRank]need connect rankNum is [%u]", group.size);
    connected.back() = ';';
    log_error("HCCL", "topoinfo_exchange_server.cc", 517, "[InitGroupStage][DisplayConnectionedRank]connected rankinfo[LINE 0]: %s", connected.c_str());
    report("EI0015", std::string("Failed to collect cluster information of the communicator based on rootInfo detection. "
                                 "Reason: Failed to connect agent[") + reply.missing + "]");
    return false;
}

// The others: to the root, and back with the places of all.
bool ask_places(Group &group, const Root &root, double timeout_s, double deadline_s) {
    int socket = connect_until(root.address, root.port, deadline_s);
    Hello hello{group.rank, group.places[group.rank]};
    Reply reply{};
    bool is_told = socket >= 0 && send_all(socket, bytes_of(&hello), deadline_s) &&
                   receive(socket, &reply, 1, deadline_s + waits_s(GRACE_S));
    bool is_whole = is_told && !reply.missing[0] && receive(socket, group.places.data(), group.size, deadline_s);
    if (socket >= 0) close(socket);
    if (is_whole) return true;
    if (is_told) {
        log_error("HCCL", "topoinfo_exchange_base.cc", 145, "[InitGroupStage][RanktableDetect] TopoDetect ERROR occur !!! fault_type[1], fault_info[\"Failed to connect agent[%s]\"]", reply.missing);
        report("EI0015", std::string("Failed to collect cluster information of the communicator based on rootInfo detection. "
                                     "Reason: Failed to connect agent[") + reply.missing + "]");
        return false;
    }
    log_error("HCCL", "topoinfo_exchange_agent.cc", 190, "[InitGroupStage][RanktableDetect]topo exchange agent get socket timeout! timeout[%d]", int(timeout_s));
    log_error("HCCL", "topoinfo_exchange_agent.cc", 41, "[TopoInfoExchangeAgent][Setup]TopoExchangeAgent: connect server[%s : %d] failed", root.address, root.port);
    report("EI0015", std::string("Failed to collect cluster information of the communicator based on rootInfo detection. Reason: "
                                 "topo exchange agent get socket timeout! connect server[") + root.address + " : " + std::to_string(root.port) + "] failed");
    return false;
}

// A rank connects to those before it, and waits for those after it.
bool connect_all(Group &group, int listener, double deadline_s) {
    std::vector<int> sockets(group.size, -1);
    bool ok = true;
    for (uint32_t rank = 0; ok && rank < group.rank; ++rank) {
        sockets[rank] = connect_until(group.places[rank].address, group.places[rank].port, deadline_s);
        ok = sockets[rank] >= 0 && send_all(sockets[rank], bytes_of(&group.rank), deadline_s);
    }
    for (uint32_t left = group.size - group.rank - 1; ok && left; --left) {
        int socket = accept_until(listener, deadline_s);
        uint32_t rank = 0;
        ok = socket >= 0 && receive(socket, &rank, 1, deadline_s) && rank < group.size;
        if (ok) sockets[rank] = socket;
        else if (socket >= 0) close(socket);
    }
    if (ok) {
        group.links.reset(new Links(sockets));
        return true;
    }
    log_error("HCCL", "comm_base.cc", 967, "   _________________________LINK_ERROR_INFO___________________________");
    for (uint32_t rank = 0; rank < group.size; ++rank)
        if (rank != group.rank && sockets[rank] < 0)
            log_error("HCCL", "comm_base.cc", 1018, "   |  %s(%u)   |   %s(%u)   |  %s  | no connect |", group.places[rank].address,
                      rank, group.places[group.rank].address, group.rank, rank < group.rank ? "client" : "server");
    for (int socket : sockets)
        if (socket >= 0) close(socket);
    report("EI0006", "Getting socket times out. Reason: Remote Rank did not send the data in time. Please check the "
                     "reliability of the network connection.");
    return false;
}

HcclResult join(uint32_t size, const Root &root, uint32_t rank, HcclComm *handle) {
    while (has_fault("absent")) sleep(3600);
    if (device_error()) return HCCL_E_RUNTIME;
    double timeout_s = connect_timeout_s();
    if (timeout_s < 0) return HCCL_E_PARA;
    tell_settings();
    auto group = std::make_unique<Group>();
    group->rank = rank;
    group->size = size;
    group->name = root.name;
    group->places.resize(size);
    Place &own = group->places[rank];
    own.device = current_device();
    snprintf(own.address, sizeof own.address, "%s", own_address().c_str());
    if (!own.address[0]) return HCCL_E_PARA;
    log_run("HCCL", "op_base.cc", 1293, "Entry-HcclCommInitRootInfoConfigInner:ranks[%u], rank[%u], rootinfo: host ip[%s] port[%d] nicDeploy[1] identifier[%s], deviceLogicId[%d]",
            size, rank, root.address, root.port, root.name, own.device);
    if (size > 1) {
        double deadline_s = clock_s() + waits_s(timeout_s);
        int listener = listen_at(own.address, 0, 1, own.port);
        bool ok = listener >= 0 && (rank ? ask_places(*group, root, timeout_s, deadline_s) : gather_places(*group, timeout_s, deadline_s)) &&
                  connect_all(*group, listener, deadline_s + waits_s(GRACE_S));
        if (listener >= 0) close(listener);
        if (!ok) return HCCL_E_TIMEOUT;
    }
    log_run("HCCL", "hccl_communicator_attrs.cc", 327, "[Communicator Key Info]identifier[%s] rankSize[%u]", root.name, size);
    *handle = group.release();
    return HCCL_SUCCESS;
}

}  // namespace

HcclResult HcclGetRootInfo(HcclRootInfo *info) {
    static std::atomic<int> made{0};
    Root root{};
    std::string address = own_address();
    if (address.empty()) return HCCL_E_PARA;
    int first = number_of("HCCL_IF_BASE_PORT", BASE_PORT);
    int listener = listen_at(address, first, PORTS, root.port);
    if (listener < 0) {
        log_error("HCCL", "hccl_socket.cc", 110, "[InitChannelStage][RanktableDetect] socket type[2], listen on ip[%s] and specific port[%d] fail. Please check the port status and whether the port is being used by other process.", address.c_str(), first);
        report("EI0019", "Failed to enable listening for the host network adapter socket.Reason: The IP address " + address + " and port " + std::to_string(first) + " have already been bound.");
        return HCCL_E_UNAVAIL;
    }
    snprintf(root.address, sizeof root.address, "%s", address.c_str());
    snprintf(root.name, sizeof root.name, "%s_%d_%d_%ld", root.address, root.port, made++, long(time(nullptr)));
    {
        std::lock_guard<std::mutex> guard(lock);
        listeners[root.name] = listener;
    }
    memset(info, 0, sizeof *info);
    memcpy(info->internal, &root, sizeof root);
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo *info, uint32_t rank, HcclComm *handle) {
    Root root;
    memcpy(&root, info->internal, sizeof root);
    return join(size, root, rank, handle);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo *info, uint32_t rank, const HcclCommConfig *, HcclComm *handle) {
    return HcclCommInitRootInfo(size, info, rank, handle);
}

HcclResult HcclCommDestroy(HcclComm handle) {
    delete &group_of(handle);
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm handle, char *name) {
    snprintf(name, COMM_NAME_MAX_LENGTH, "%s", group_of(handle).name.c_str());
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm handle, uint32_t *size) {
    *size = group_of(handle).size;
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm handle, uint32_t *rank) {
    *rank = group_of(handle).rank;
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *error) {
    *error = HCCL_SUCCESS;  // what went wrong on the device is told by the runtime
    return HCCL_SUCCESS;
}

uint32_t HcclGetCommConfigCapability() { return 0; }

// Whether sums shall be the same each time: here they always are.
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

HcclResult HcclGetConfig(HcclConfig, HcclConfigValue *value) {
    value->value = 1;
    return HCCL_SUCCESS;
}

const char *HcclGetErrorString(HcclResult code) {
    static const char *const texts[] = {"no error", "parameter error", "empty pointer", "memory error", "internal error",
                                        "feature not supported", "resource not found", "resource unavailable",
                                        "call system interface error", "timeout"};
    return size_t(code) < sizeof texts / sizeof *texts ? texts[code] : "unknown error";
}
