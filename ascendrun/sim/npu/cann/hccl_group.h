// A communicator: its ranks, where they are, and the connections between them.
#pragma once

#include "hccl/hccl.h"
#include "hccl_links.h"

#include <memory>
#include <string>
#include <vector>

namespace sim {

struct Place {
    char address[48];
    int port;
    int device;
};

struct Group {
    uint32_t rank = 0;
    uint32_t size = 1;
    std::string name;
    std::vector<Place> places;
    std::unique_ptr<Links> links;
    uint64_t calls = 0;
};

inline Group &group_of(HcclComm handle) { return *static_cast<Group *>(handle); }

// The address that the other hosts find this one at: HCCL_IF_IP, HCCL_SOCKET_IFNAME, or the first interface by name
// that is neither docker's nor lo. Empty: the wish cannot be met, and report() has said so.
std::string own_address();

}  // namespace sim
