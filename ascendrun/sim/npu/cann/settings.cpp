// What the environment, or the simulated node that this is, says: devices, chip, memory, the pace of waits.
#include "sim.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

namespace sim {

static const char *text_of(const char *variable) {
    const char *text = getenv(variable);
    return text && *text ? text : nullptr;
}

int number_of(const char *variable, int otherwise) {
    const char *text = text_of(variable);
    return text ? atoi(text) : otherwise;
}

// The file of the simulated node (ascendrun/sim/ascend) that this process runs on; empty where it is none.
static const std::string &node() {
    static const std::string text = [] {
        const char *root = text_of("ASCENDRUN_SIM_ROOT");
        std::ifstream file(std::string(root ? root : "") + "/var/lib/ascend-sim/node.json");
        std::ostringstream all;
        if (file) all << file.rdbuf();
        return all.str();
    }();
    return text;
}

// What follows the first `"key": ` there, without quotes; "" where it does not stand there.
static std::string of_node(const std::string &key) {
    size_t at = node().find('"' + key + "\": ");
    if (at == std::string::npos) return "";
    std::string value = node().substr(at + key.size() + 4, node().find_first_of(",\n", at) - at - key.size() - 4);
    value.erase(std::remove(value.begin(), value.end(), '"'), value.end());
    return value;
}

static int cards_of_node() {
    int count = 0;
    for (size_t at = node().find("\"bus_id\""); at != std::string::npos; at = node().find("\"bus_id\"", at + 1)) ++count;
    return count;
}

static int installed_devices() {
    return std::clamp(number_of("ASCENDRUN_SIM_NPU_DEVICES", node().empty() ? 8 : cards_of_node()), 0, 64);
}

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
    static const std::string name = [] {
        std::string of_card = of_node("chip");
        if (const char *wish = text_of("ASCENDRUN_SIM_NPU_CHIP")) return std::string(wish);
        if (of_card == "910_93") return std::string("Ascend910_9391");  // the name of a family; torch_npu is told a member
        return of_card.empty() ? std::string("Ascend910B3") : of_card.rfind("Ascend", 0) == 0 ? of_card : "Ascend" + of_card;
    }();
    return name;
}

size_t memory_bytes() {
    static const size_t bytes = [] {
        int of_card = atoi(of_node("hbm_mb").c_str());
        return size_t(number_of("ASCENDRUN_SIM_NPU_MEMORY_MB", of_card > 0 ? of_card : 65536)) << 20;
    }();
    return bytes;
}

double waits_s(double seconds) {
    const char *speed = text_of("ASCENDRUN_SIM_NPU_SPEEDUP");
    return seconds / (speed ? std::max(1.0, atof(speed)) : 1.0);
}

int rank_of_process() { return number_of("RANK", 0); }

}  // namespace sim
