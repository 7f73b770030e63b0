// What the environment says of the node: devices, chip, memory, the pace of waits.
#include "sim.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sim {

static const char *text_of(const char *variable) {
    const char *text = getenv(variable);
    return text && *text ? text : nullptr;
}

int number_of(const char *variable, int otherwise) {
    const char *text = text_of(variable);
    return text ? atoi(text) : otherwise;
}

static int installed_devices() { return std::clamp(number_of("ASCENDRUN_SIM_NPU_DEVICES", 8), 0, 64); }

int device_count() {
    static const int count = [] {
        const char *visible = text_of("ASCEND_RT_VISIBLE_DEVICES");
        if (!visible) return installed_devices();
        int listed = 0;
        for (const char *at = visible; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : nullptr) {
            if (atoi(at) >= installed_devices()) break;  // CANN takes the list up to the first id that is none
            ++listed;
        }
        return listed;
    }();
    return count;
}

const std::string &chip() {
    static const std::string name = text_of("ASCENDRUN_SIM_NPU_CHIP") ? text_of("ASCENDRUN_SIM_NPU_CHIP") : "Ascend910B3";
    return name;
}

size_t memory_bytes() {
    static const size_t bytes = size_t(number_of("ASCENDRUN_SIM_NPU_MEMORY_MB", 65536)) << 20;
    return bytes;
}

double waits_s(double seconds) {
    const char *speed = text_of("ASCENDRUN_SIM_NPU_HURRY");
    return seconds / (speed ? std::max(1.0, atof(speed)) : 1.0);
}

int rank_of_process() { return number_of("RANK", 0); }

}  // namespace sim
