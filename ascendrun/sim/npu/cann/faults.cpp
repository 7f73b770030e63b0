// Faults that a test asks for, by ASCENDRUN_SIM_NPU_FAULTS or the file that ASCENDRUN_SIM_NPU_FAULTS_FILE names.
//
// Each is NAME[:RANK][@COLLECTIVE], several are parted by blanks: "hbm-ecc:1@20" comes over rank 1 with its 20th
// collective; without a rank over all, without a number at once. The file may be written while the ranks run.
#include "sim.h"

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace sim {

static std::atomic<int> collectives{0};

void count_collective() { ++collectives; }

static std::string wanted() {
    std::string text = getenv("ASCENDRUN_SIM_NPU_FAULTS") ? getenv("ASCENDRUN_SIM_NPU_FAULTS") : "";
    if (const char *path = getenv("ASCENDRUN_SIM_NPU_FAULTS_FILE")) {
        std::ifstream file(path);
        std::ostringstream all;
        if (file) all << ' ' << file.rdbuf();
        text += all.str();
    }
    return text;
}

static int number_after(const std::string &fault, char mark, int otherwise) {
    size_t at = fault.find(mark);
    return at == std::string::npos ? otherwise : atoi(fault.c_str() + at + 1);
}

bool has_fault(const char *name) {
    static const bool none = !getenv("ASCENDRUN_SIM_NPU_FAULTS") && !getenv("ASCENDRUN_SIM_NPU_FAULTS_FILE");
    if (none) return false;
    std::istringstream faults(wanted());
    for (std::string fault; faults >> fault;) {
        bool is_it = fault.substr(0, fault.find_first_of(":@")) == name;
        bool is_mine = number_after(fault, ':', rank_of_process()) == rank_of_process();
        if (is_it && is_mine && collectives >= number_after(fault, '@', 0)) return true;
    }
    return false;
}

}  // namespace sim
