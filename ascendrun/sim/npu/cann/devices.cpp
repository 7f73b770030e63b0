// Devices: how many, which is current, what they are called, and whether one still answers.
#include "acl/acl.h"
#include "sim.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

namespace sim {

static thread_local int current = 0;
static std::atomic<int> broken{0};

int current_device() { return current; }
void break_device(int code) { broken = code; }

int device_error() {
    if (!broken && has_fault("device-lost")) {
        log_error("DRV", "devdrv_pcie.c", 412, "[drv_soft_fault] Heartbeat lost (device=%d)", current);
        report("EE9999", "Inner Error!");
        broken = ACL_ERROR_RT_DRV_INTERNAL_ERROR;
    }
    if (!broken && has_fault("hbm-ecc")) {
        log_error("RUNTIME", "device_error_proc.cc", 1188, "report error: device_id=%d, reason=[hbm Multi-bit ECC error]", current);
        report("EE9999", "Inner Error!");
        broken = ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR;
    }
    return broken;
}

static void *context_of(int device) { return reinterpret_cast<void *>(0x1000L + device); }

// Beside this library lies the one that computes operators; it needs torch_npu, which is there by now.
static void load_operators() {
    Dl_info here;
    if (!dladdr(reinterpret_cast<void *>(&load_operators), &here)) return;
    std::string path = here.dli_fname;
    path = path.substr(0, path.rfind('/') + 1) + "libascendrun_operators.so";
    if (!dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) fprintf(stderr, "simulated CANN: %s\n", dlerror());
}

}  // namespace sim

extern "C" {

aclError aclInit(const char *) {
    static const bool once = (sim::load_operators(), true);
    return once ? ACL_SUCCESS : ACL_ERROR_REPEAT_INITIALIZE;
}

const char *aclrtGetSocName() { return sim::chip().c_str(); }

aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = uint32_t(sim::device_count());
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device) {
    *device = sim::current;
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= sim::device_count()) {
        sim::report("EE1003", "The argument is invalid.Reason: Set device failed, invalid device, set drv devId=" +
                                  std::to_string(device));
        return ACL_ERROR_RT_INVALID_DEVICEID;
    }
    sim::current = device;
    return sim::device_error();
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
    *context = sim::context_of(sim::current);
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    sim::current = int(reinterpret_cast<long>(context) - 0x1000L);
    return ACL_SUCCESS;
}

aclError aclrtCreateContext(aclrtContext *context, int32_t device) {
    *context = sim::context_of(device);
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic) {
    *logic = user;
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) {
    *can = 1;
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetBareTgid(int32_t *pid) {
    *pid = 1;
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid) {
    memset(uuid, device, sizeof *uuid);
    return ACL_SUCCESS;
}

// Cores; torch_npu shows them and shares work by them.
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t *value) {
    *value = 20;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t *value) {
    *value = 20;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType, uint32_t *value) {
    *value = 20;
    return ACL_SUCCESS;
}

aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t *value) {
    *value = 20;
    return ACL_SUCCESS;
}

aclError aclrtGetResInCurrentThread(aclrtDevResLimitType, uint32_t *value) {
    *value = 20;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo *rates) {
    memset(rates, 0, sizeof *rates);
    return ACL_SUCCESS;
}

aclError aclrtGetErrorVerbose(int32_t, aclrtErrorInfo *details) {
    memset(details, 0, sizeof *details);
    return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t *value) {
    *value = 0;
    return ACL_SUCCESS;
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    strcpy(reinterpret_cast<char *>(version), "8.5.0");
    return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(char *, char *version) {
    strcpy(version, "8.5.0");
    return ACL_SUCCESS;
}

aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
    *list = nullptr;
    *count = 0;
    return ACL_SUCCESS;
}

aclError aclGetCannAttribute(aclCannAttr, int32_t *value) {
    *value = 0;
    return ACL_SUCCESS;
}

}  // extern "C"
