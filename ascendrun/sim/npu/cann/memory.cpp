// Device memory: the host's, counted against what the chip has; pages that nobody touches cost nothing.
#include "acl/acl.h"
#include "sim.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

struct Block {
    size_t bytes;
    int device;
};

std::mutex lock;
std::map<void *, Block> blocks;
std::map<int, size_t> used;

bool take(int device, size_t bytes) {
    if (used[device] + bytes > sim::memory_bytes()) {
        sim::log_error("DRV", "devmm_svm.c", 704, "[devmm_virt_to_phy] Out of memory. (device=%d; size=%zu)", device, bytes);
        sim::report("EL0004", "Failed to allocate memory. Possible Cause: Available memory is insufficient.");
        return false;
    }
    used[device] += bytes;
    return true;
}

aclError allocate(void **pointer, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    int device = sim::current_device();
    *pointer = nullptr;
    if (!take(device, bytes)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    if (posix_memalign(pointer, 512, bytes + 32)) {  // CANN pads each block by 32 bytes
        used[device] -= bytes;
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    blocks[*pointer] = {bytes, device};
    return ACL_SUCCESS;
}

aclError release(void *pointer) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = blocks.find(pointer);
    if (found == blocks.end()) return ACL_ERROR_RT_PARAM_INVALID;
    used[found->second.device] -= found->second.bytes;
    free(pointer);
    blocks.erase(found);
    return ACL_SUCCESS;
}

aclError copy(void *to, const void *from, size_t bytes) {
    if (int code = sim::device_error()) return code;
    memmove(to, from, bytes);
    return ACL_SUCCESS;
}

aclError fill(void *to, int32_t value, size_t bytes) {
    if (int code = sim::device_error()) return code;
    memset(to, value, bytes);
    return ACL_SUCCESS;
}

// A piece of memory without an address: expandable segments map such pieces one behind the other.
struct Physical {
    int file;
    size_t bytes;
    int device;
};

std::map<void *, size_t> mapped;  // bytes by address

}  // namespace

extern "C" {

aclError aclrtMalloc(void **pointer, size_t bytes, aclrtMemMallocPolicy) { return allocate(pointer, bytes); }
aclError aclrtMallocAlign32(void **pointer, size_t bytes, aclrtMemMallocPolicy) { return allocate(pointer, bytes); }
aclError aclrtFree(void *pointer) { return release(pointer); }

aclError aclrtMallocHost(void **pointer, size_t bytes) {
    return posix_memalign(pointer, 4096, bytes ? bytes : 1) ? ACL_ERROR_RT_MEMORY_ALLOCATION : ACL_SUCCESS;
}

aclError aclrtMallocHostWithCfg(void **pointer, uint64_t bytes, aclrtMallocConfig *) { return aclrtMallocHost(pointer, bytes); }

aclError aclrtFreeHost(void *pointer) {
    free(pointer);
    return ACL_SUCCESS;
}

aclError aclrtMemcpy(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind) { return copy(to, from, bytes); }

aclError aclrtMemcpyAsync(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind, aclrtStream) {
    return copy(to, from, bytes);
}

aclError aclrtMemcpyAsyncWithCondition(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind, aclrtStream) {
    return copy(to, from, bytes);
}

aclError aclrtMemset(void *to, size_t, int32_t value, size_t bytes) { return fill(to, value, bytes); }
aclError aclrtMemsetAsync(void *to, size_t, int32_t value, size_t bytes, aclrtStream) { return fill(to, value, bytes); }

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total) {
    std::lock_guard<std::mutex> guard(lock);
    *total = sim::memory_bytes();
    *free_bytes = *total - used[sim::current_device()];
    return ACL_SUCCESS;
}

aclError aclrtGetMemUsageInfo(int32_t, aclrtMemUsageInfo *, size_t, size_t *count) {
    *count = 0;
    return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
    std::lock_guard<std::mutex> guard(lock);
    memset(attributes, 0, sizeof *attributes);
    auto after = blocks.upper_bound(const_cast<void *>(pointer));
    bool is_ours = after != blocks.begin() &&
                   pointer < static_cast<char *>(std::prev(after)->first) + std::prev(after)->second.bytes;
    attributes->location.type = is_ours ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_HOST;
    attributes->location.id = is_ours ? uint32_t(std::prev(after)->second.device) : 0;
    return ACL_SUCCESS;
}

aclError aclrtReserveMemAddress(void **pointer, size_t bytes, size_t, void *, uint64_t) {
    *pointer = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *pointer == MAP_FAILED ? ACL_ERROR_RT_MEMORY_ALLOCATION : ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void *) { return ACL_SUCCESS; }  // an address range costs nothing

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t bytes, const aclrtPhysicalMemProp *wish, uint64_t) {
    std::lock_guard<std::mutex> guard(lock);
    int device = int(wish->location.id);
    if (!take(device, bytes)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    int file = memfd_create("simulated-npu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, off_t(bytes))) {
        if (file >= 0) close(file);
        used[device] -= bytes;
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    *handle = new Physical{file, bytes, device};
    return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    std::lock_guard<std::mutex> guard(lock);
    auto *piece = static_cast<Physical *>(handle);
    used[piece->device] -= piece->bytes;
    close(piece->file);
    delete piece;
    return ACL_SUCCESS;
}

aclError aclrtMapMem(void *at, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
    void *got = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, static_cast<Physical *>(handle)->file, off_t(offset));
    if (got == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    std::lock_guard<std::mutex> guard(lock);
    mapped[at] = bytes;
    return ACL_SUCCESS;
}

// The address range stays reserved; a mapping that stayed would hold the host's memory beyond aclrtFreePhysical.
aclError aclrtUnmapMem(void *at) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = mapped.find(at);
    if (found == mapped.end()) return ACL_ERROR_RT_PARAM_INVALID;
    void *got = mmap(at, found->second, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    mapped.erase(found);
    return got == MAP_FAILED ? ACL_ERROR_RT_MEMORY_ALLOCATION : ACL_SUCCESS;
}

}  // extern "C"
