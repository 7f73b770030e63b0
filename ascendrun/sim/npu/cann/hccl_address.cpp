// Which address of this host HCCL takes for itself.
#include "hccl_group.h"
#include "sim.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>

namespace sim {

static std::map<std::string, std::string> interfaces() {
    std::map<std::string, std::string> found;
    ifaddrs *first = nullptr;
    if (getifaddrs(&first)) return found;
    for (ifaddrs *at = first; at; at = at->ifa_next) {
        if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET || !(at->ifa_flags & IFF_UP)) continue;
        char text[INET_ADDRSTRLEN];
        inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in *>(at->ifa_addr)->sin_addr, text, sizeof text);
        found.emplace(at->ifa_name, text);
    }
    freeifaddrs(first);
    return found;
}

static bool starts_with(const std::string &text, const std::string &start) { return text.compare(0, start.size(), start) == 0; }

// "eth,ib": names that start so; "=eth0": this one; "^docker": any but those, "^=lo": any but this one.
static std::string by_name(const std::map<std::string, std::string> &all, std::string wish) {
    bool is_not = starts_with(wish, "^");
    wish = wish.substr(is_not);
    bool is_exact = starts_with(wish, "=");
    wish = wish.substr(is_exact);
    for (const auto &[name, address] : all) {
        bool is_listed = false;
        std::istringstream names(wish);
        for (std::string one; std::getline(names, one, ',');) is_listed |= is_exact ? name == one : starts_with(name, one);
        if (is_listed != is_not) return address;
    }
    return "";
}

std::string own_address() {
    auto all = interfaces();
    const char *address = getenv("HCCL_IF_IP"), *name = getenv("HCCL_SOCKET_IFNAME");
    if (address && *address) {
        for (const auto &one : all)
            if (one.second == address) return address;
        log_error("HCCL", "sal.cc", 611, "[Find][LocalHostIP]ip [%s] of [HCCL_IF_IP] is not found in the nic list", address);
        report("EI0001", std::string("Environment variable [HCCL_IF_IP] is invalid. Reason: ") + address + " is no address of this host.");
        return "";
    }
    if (name && *name) {
        std::string found = by_name(all, name);
        if (!found.empty()) return found;
        log_error("HCCL", "sal.cc", 655, "[Find][LocalHostIP]set ifname to [%s] by HCCL_SOCKET_IFNAME, but not found", name);
        report("EI0001", std::string("Environment variable [HCCL_SOCKET_IFNAME] is invalid. Reason: set ifname to [") + name +
                             "] by HCCL_SOCKET_IFNAME, but not found");
        return "";
    }
    std::string found = by_name(all, "^docker,lo");
    if (found.empty()) found = by_name(all, "docker");
    return found.empty() ? "127.0.0.1" : found;
}

}  // namespace sim
