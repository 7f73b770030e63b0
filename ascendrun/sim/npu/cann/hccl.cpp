// The collectives: who sends what to whom, and what comes of it. Each is done when its call returns.
#include "acl/acl.h"
#include "hccl_group.h"
#include "hccl_reduce.h"
#include "sim.h"

#include <unistd.h>

#include <cstring>
#include <ctime>

namespace {

using namespace sim;

struct Part {
    const void *data;
    size_t bytes;
};

// What one rank is about to do; ranks that do different things at once are told so.
struct Call {
    const char *name;
    uint64_t count;
    HcclDataType type;
    uint32_t detail;  // the operation, or the root
};

uint64_t mark_of(const Group &group, const Call &call) {
    uint64_t mark = 1469598103934665603u;
    for (const char *at = call.name; *at; ++at) mark = (mark ^ uint64_t(*at)) * 1099511628211u;
    for (uint64_t value : {group.calls, call.count, uint64_t(call.type), uint64_t(call.detail)}) mark = (mark ^ value) * 1099511628211u;
    return mark;
}

double exec_timeout_s() { return waits_s(number_of("HCCL_EXEC_TIMEOUT", 1836)); }

// The device gave up waiting for `peer`: what HCCL writes then, and from now on the stream's error.
void give_up(const Group &group, const Call &call, int peer) {
    const Place &own = group.places[group.rank], &other = group.places[peer];
    bool is_lost = group.links->is_lost(peer);
    time_t now = time(nullptr);
    tm parts;
    char when[64];
    localtime_r(&now, &parts);
    strftime(when, sizeof when, "%a %b %e %H:%M:%S %Y", &parts);
    char culprit[512];
    snprintf(culprit, sizeof culprit, "Cluster Exception Location[IP/ID]:[%s/%d], Arrival Time:[%s], Discoverer:[%s/%d], ExceptionType:[%s Occurred], Possible Reason:%s",
             other.address, other.device, when, own.address, own.device, is_lost ? "Heartbeat Lost" : "Stuck",
             is_lost ? "1. Process has exited, 2. Network Disconnected" : "1.Host process is stuck, 2.Device task is stuck");
    log_error("HCCL", "task_exception_handler.cc", 610, "[TaskExecStage][HeartbeatAbnormal]%s", culprit);
    log_error("HCCL", "task_exception_handler.cc", 771, "[TaskExecStage][Timeout][Host]Task run failed, groupRank information is group:[%s], user define information[], rankSize[%u], rankId[%u].",
              group.name.c_str(), group.size, group.rank);
    report("EI0002", "The wait execution of the Notify register times out. Reason: The Notify register has not received the "
                     "Notify record from remote rank [" + std::to_string(peer) + "].base information: [streamID:[3], taskID[" +
                     std::to_string(group.calls) + "], tag[" + call.name + "_" + group.name + "], AlgType(level 0-1-2):[fullmesh-ring-ring].] "
                     "task information: [\nthere are(is) 1 abnormal device(s):\n    " + culprit + "\n]");
    break_device(ACL_ERROR_RT_FFTS_PLUS_TIMEOUT);
}

void tell_mismatch(const Group &group, const Call &call, int peer) {
    log_error("HCCL", "rank_consistentcy_checker.cc", 455, "[InitChannelStage][ParameterConflict]CMD information %s check fail. local[count:%lu, dataType:%d, detail:%u], remote rank[%d]",
              call.name, (unsigned long)call.count, int(call.type), call.detail, peer);
    report("EI0005", "The arguments for collective communication are inconsistent between ranks: tag " + std::string(call.name) +
                     "_" + group.name + ", local count " + std::to_string(call.count) + ", remote rank " + std::to_string(peer));
    break_device(ACL_ERROR_RT_FFTS_PLUS_TIMEOUT);
}

// Before each collective. False: this device does nothing any more; its next synchronisation says why.
bool may_begin(Group &group) {
    ++group.calls;
    count_collective();
    while (has_fault("silent")) sleep(3600);
    return device_error() == 0;
}

// Sends part i to rank i where `gives`, and takes one from rank i where `takes`; {} when a peer did not come.
template <typename Gives, typename Takes>
std::vector<Bytes> exchange(Group &group, const Call &call, const std::vector<Part> &parts, Gives gives, Takes takes) {
    uint64_t mark = mark_of(group, call);
    double deadline_s = clock_s() + exec_timeout_s();
    std::vector<Bytes> arrived(group.size);
    for (uint32_t rank = 0; rank < group.size; ++rank) {
        if (!gives(rank)) continue;
        auto *start = static_cast<const char *>(parts[rank].data);
        Bytes bytes(start, start + parts[rank].bytes);
        if (rank == group.rank) arrived[rank] = std::move(bytes);
        else group.links->send(int(rank), Channel::collective, {mark, std::move(bytes)});
    }
    for (uint32_t rank = 0; rank < group.size; ++rank) {
        if (rank == group.rank || !takes(rank)) continue;
        Frame frame;
        if (!group.links->receive(int(rank), Channel::collective, frame, deadline_s - clock_s())) {
            give_up(group, call, int(rank));
            return {};
        }
        if (frame.call != mark) {
            tell_mismatch(group, call, int(rank));
            return {};
        }
        arrived[rank] = std::move(frame.bytes);
    }
    return arrived;
}

bool always(uint32_t) { return true; }

std::vector<Part> same_for_all(const Group &group, const void *data, size_t bytes) {
    return std::vector<Part>(group.size, Part{data, bytes});
}

HcclResult refuse(const char *name, const char *parameter) {
    report("EI0003", std::string("In [") + name + "], value of parameter [" + parameter +
                         "] is invalid. Reason: The collective communication operator has an invalid argument.");
    return HCCL_E_PARA;
}

std::vector<const char *> starts_of(const std::vector<Bytes> &parts) {
    std::vector<const char *> starts;
    for (const Bytes &part : parts) starts.push_back(part.data());
    return starts;
}

const uint64_t *numbers(const void *list) { return static_cast<const uint64_t *>(list); }
const char *at(const void *data, size_t offset) { return static_cast<const char *>(data) + offset; }
char *at(void *data, size_t offset) { return static_cast<char *>(data) + offset; }

// Each rank gets the parts [first[rank], first[rank + 1]) of all, reduced.
HcclResult reduce_parts(Group &group, const Call &call, const void *send, void *receive, const std::vector<size_t> &first) {
    size_t width = width_of(call.type);
    std::vector<Part> parts;
    for (uint32_t rank = 0; rank < group.size; ++rank)
        parts.push_back({at(send, first[rank] * width), (first[rank + 1] - first[rank]) * width});
    auto arrived = exchange(group, call, parts, always, always);
    size_t count = first[group.rank + 1] - first[group.rank];
    if (!arrived.empty() && !reduce(receive, starts_of(arrived), count, call.type, HcclReduceOp(call.detail))) return refuse(call.name, "op or dataType");
    return HCCL_SUCCESS;
}

HcclResult gather_parts(Group &group, const Call &call, const void *send, void *receive, const std::vector<size_t> &first) {
    size_t width = width_of(call.type);
    size_t own = (first[group.rank + 1] - first[group.rank]) * width;
    auto arrived = exchange(group, call, same_for_all(group, send, own), always, always);
    for (size_t rank = 0; rank < arrived.size(); ++rank) memcpy(at(receive, first[rank] * width), arrived[rank].data(), arrived[rank].size());
    return HCCL_SUCCESS;
}

std::vector<size_t> equal_parts(const Group &group, size_t each) {
    std::vector<size_t> first;
    for (uint32_t rank = 0; rank <= group.size; ++rank) first.push_back(rank * each);
    return first;
}

std::vector<size_t> fair_parts(const Group &group, size_t count) {
    std::vector<size_t> first;
    for (uint32_t rank = 0; rank <= group.size; ++rank) first.push_back(count * rank / group.size);
    return first;
}

// What rank i sends to rank j at `send_at`, `send_counts`, and this one takes at `receive_at`.
HcclResult exchange_parts(Group &group, const Call &call, const void *send, const uint64_t *send_counts, const uint64_t *send_at,
                          void *receive, const uint64_t *receive_counts, const uint64_t *receive_at) {
    size_t width = width_of(call.type);
    std::vector<Part> parts;
    for (uint32_t rank = 0; rank < group.size; ++rank) parts.push_back({at(send, send_at[rank] * width), send_counts[rank] * width});
    auto arrived = exchange(group, call, parts, always, always);
    for (size_t rank = 0; rank < arrived.size(); ++rank) {
        if (arrived[rank].size() != receive_counts[rank] * width) {
            tell_mismatch(group, call, int(rank));
            break;
        }
        memcpy(at(receive, receive_at[rank] * width), arrived[rank].data(), arrived[rank].size());
    }
    return HCCL_SUCCESS;
}

void send_message(Group &group, const void *data, size_t bytes, int peer) {
    group.links->send(peer, Channel::message, {bytes, Bytes(at(data, 0), at(data, bytes))});
}

void receive_message(Group &group, void *data, size_t bytes, int peer) {
    Frame frame;
    Call call{"Receive", bytes, HCCL_DATA_TYPE_INT8, uint32_t(peer)};
    if (!group.links->receive(peer, Channel::message, frame, exec_timeout_s())) give_up(group, call, peer);
    else if (frame.bytes.size() != bytes) tell_mismatch(group, call, peer);
    else memcpy(data, frame.bytes.data(), bytes);
}

}  // namespace

HcclResult HcclAllReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp how, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (!width_of(type)) return refuse("HcclAllReduce", "dataType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    auto first = fair_parts(group, count);
    std::vector<char> own((first[group.rank + 1] - first[group.rank]) * width_of(type));
    HcclResult result = reduce_parts(group, {"AllReduce", count, type, uint32_t(how)}, send, own.data(), first);
    if (result || device_error()) return result;
    return gather_parts(group, {"AllReduceEnd", count, type, uint32_t(how)}, own.data(), receive, first);
}

HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp how, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (!width_of(type)) return refuse("HcclReduceScatter", "dataType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    return reduce_parts(group, {"ReduceScatter", count, type, uint32_t(how)}, send, receive, equal_parts(group, count));
}

HcclResult HcclReduceScatterV(void *send, const void *counts, const void *places, void *receive, uint64_t, HcclDataType type,
                              HcclReduceOp how, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (!width_of(type)) return refuse("HcclReduceScatterV", "dataType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    std::vector<size_t> first(numbers(places), numbers(places) + group.size);
    first.push_back(first.back() + numbers(counts)[group.size - 1]);
    return reduce_parts(group, {"ReduceScatterV", first.back(), type, uint32_t(how)}, send, receive, first);
}

HcclResult HcclReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp how, uint32_t root, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (!width_of(type)) return refuse("HcclReduce", "dataType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    bool is_root = group.rank == root;
    auto arrived = exchange(group, {"Reduce", count, type, root}, same_for_all(group, send, count * width_of(type)),
                            [&](uint32_t rank) { return rank == root; }, [&](uint32_t) { return is_root; });
    if (is_root && !arrived.empty() && !reduce(receive, starts_of(arrived), count, type, how)) return refuse("HcclReduce", "op or dataType");
    return HCCL_SUCCESS;
}

HcclResult HcclBroadcast(void *data, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (!width_of(type)) return refuse("HcclBroadcast", "dataType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    bool is_root = group.rank == root;
    auto arrived = exchange(group, {"Broadcast", count, type, root}, same_for_all(group, data, count * width_of(type)),
                            [&](uint32_t) { return is_root; }, [&](uint32_t rank) { return rank == root; });
    if (!is_root && !arrived.empty()) memcpy(data, arrived[root].data(), arrived[root].size());
    return HCCL_SUCCESS;
}

HcclResult HcclScatter(void *send, void *receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (!width_of(type)) return refuse("HcclScatter", "dataType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    bool is_root = group.rank == root;
    size_t bytes = count * width_of(type);
    std::vector<Part> parts;
    for (uint32_t rank = 0; rank < group.size; ++rank) parts.push_back({is_root ? at(send, rank * bytes) : nullptr, is_root ? bytes : 0});
    auto arrived = exchange(group, {"Scatter", count, type, root}, parts, [&](uint32_t) { return is_root; },
                            [&](uint32_t rank) { return rank == root; });
    if (!arrived.empty()) memcpy(receive, arrived[root].data(), arrived[root].size());
    return HCCL_SUCCESS;
}

HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType type, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (!width_of(type)) return refuse("HcclAllGather", "dataType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    return gather_parts(group, {"AllGather", count, type, 0}, send, receive, equal_parts(group, count));
}

HcclResult HcclAllGatherV(void *send, uint64_t, void *receive, const void *counts, const void *places, HcclDataType type, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (!width_of(type)) return refuse("HcclAllGatherV", "dataType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    std::vector<size_t> first(numbers(places), numbers(places) + group.size);
    first.push_back(first.back() + numbers(counts)[group.size - 1]);
    return gather_parts(group, {"AllGatherV", first.back(), type, 0}, send, receive, first);
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (may_begin(group)) exchange(group, {"Barrier", 0, HCCL_DATA_TYPE_INT8, 0}, same_for_all(group, nullptr, 0), always, always);
    return HCCL_SUCCESS;
}

HcclResult HcclAlltoAll(const void *send, uint64_t count, HcclDataType type, const void *receive, uint64_t, HcclDataType, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (!width_of(type)) return refuse("HcclAlltoAll", "dataType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    std::vector<uint64_t> counts(group.size, count), places;
    for (uint32_t rank = 0; rank < group.size; ++rank) places.push_back(rank * count);
    return exchange_parts(group, {"AlltoAll", count, type, 0}, send, counts.data(), places.data(), const_cast<void *>(receive),
                          counts.data(), places.data());
}

HcclResult HcclAlltoAllV(const void *send, const void *send_counts, const void *send_at, HcclDataType type, const void *receive,
                         const void *receive_counts, const void *receive_at, HcclDataType, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (!width_of(type)) return refuse("HcclAlltoAllV", "sendType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    return exchange_parts(group, {"AlltoAllV", 0, type, 0}, send, numbers(send_counts), numbers(send_at), const_cast<void *>(receive),
                          numbers(receive_counts), numbers(receive_at));
}

HcclResult HcclAlltoAllVC(const void *send, const void *matrix, HcclDataType type, const void *receive, HcclDataType, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    if (!width_of(type)) return refuse("HcclAlltoAllVC", "sendType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    std::vector<uint64_t> gives, gives_at, takes, takes_at;
    uint64_t out = 0, in = 0;
    for (uint32_t rank = 0; rank < group.size; ++rank) {
        gives.push_back(numbers(matrix)[group.rank * group.size + rank]);
        takes.push_back(numbers(matrix)[rank * group.size + group.rank]);
        gives_at.push_back(out);
        takes_at.push_back(in);
        out += gives.back();
        in += takes.back();
    }
    return exchange_parts(group, {"AlltoAllVC", 0, type, 0}, send, gives.data(), gives_at.data(), const_cast<void *>(receive), takes.data(), takes_at.data());
}

HcclResult HcclSend(void *data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle, aclrtStream) {
    if (!width_of(type)) return refuse("HcclSend", "dataType");
    if (may_begin(group_of(handle))) send_message(group_of(handle), data, count * width_of(type), int(peer));
    return HCCL_SUCCESS;
}

HcclResult HcclRecv(void *data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle, aclrtStream) {
    if (!width_of(type)) return refuse("HcclRecv", "dataType");
    if (may_begin(group_of(handle))) receive_message(group_of(handle), data, count * width_of(type), int(peer));
    return HCCL_SUCCESS;
}

// All that is sent first: two ranks that exchange must not wait for each other.
HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm handle, aclrtStream) {
    Group &group = group_of(handle);
    for (auto *item = items; item < items + count; ++item)
        if (!width_of(item->dataType)) return refuse("HcclBatchSendRecv", "dataType");
    if (!may_begin(group)) return HCCL_SUCCESS;
    for (auto *item = items; item < items + count; ++item)
        if (item->sendRecvType == HCCL_SEND) send_message(group, item->buf, item->count * width_of(item->dataType), int(item->remoteRank));
    for (auto *item = items; item < items + count; ++item)
        if (item->sendRecvType == HCCL_RECV) receive_message(group, item->buf, item->count * width_of(item->dataType), int(item->remoteRank));
    return HCCL_SUCCESS;
}
