// One TCP connection to every peer of a communicator, and a thread that moves frames over them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

using Bytes = std::vector<char>;

enum class Channel : uint32_t { collective, message };

// `call` says what the sender was doing, so that ranks which do different things are told, not mixed.
struct Frame {
    uint64_t call;
    Bytes bytes;
};

class Links {
public:
    // `sockets[rank]`: connected to that rank, -1 for this one. They are the object's from now on.
    explicit Links(std::vector<int> sockets);
    ~Links();

    // Never waits: the frame is kept until the peer takes it.
    void send(int peer, Channel channel, Frame frame);
    // False: none came in time. A lost peer is waited for all the same, as a real device does.
    bool receive(int peer, Channel channel, Frame &frame, double timeout_s);
    bool is_lost(int peer);

private:
    struct Peer {
        int socket;
        bool lost = false;
        std::deque<Bytes> out;
        size_t out_at = 0;
        Bytes in;
        size_t in_at = 0;
        std::map<Channel, std::deque<Frame>> arrived;
    };

    void move();
    void read_from(Peer &peer);
    void write_to(Peer &peer);
    void take_frame(Peer &peer);
    void wake();

    std::mutex lock_;
    std::condition_variable news_;
    std::vector<Peer> peers_;
    int bell_[2];
    bool ending_ = false;
    struct Worker;
    Worker *worker_;
};

// --- doors to the network; -1: could not ---
int listen_at(const std::string &address, int first_port, int ports, int &port);
int accept_until(int listener, double deadline_s);
int connect_until(const std::string &address, int port, double deadline_s);
bool send_all(int socket, const Bytes &bytes, double deadline_s);
bool receive_all(int socket, Bytes &bytes, double deadline_s);
double clock_s();

}  // namespace sim
