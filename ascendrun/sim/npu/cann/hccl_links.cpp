// Moves frames between this rank and its peers.
#include "hccl_links.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

namespace sim {

struct Header {
    uint32_t channel;
    uint32_t unused;
    uint64_t call;
    uint64_t bytes;
};

struct Links::Worker {
    std::thread thread;
};

double clock_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Links::Links(std::vector<int> sockets) {
    for (int socket : sockets) {
        peers_.emplace_back();
        peers_.back().socket = socket;
        peers_.back().in.resize(sizeof(Header));
        if (socket >= 0) fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    }
    if (pipe2(bell_, O_CLOEXEC | O_NONBLOCK)) bell_[0] = bell_[1] = -1;
    worker_ = new Worker{std::thread([this] { move(); })};
}

// What was sent still goes out: a peer may not have taken the last frames yet.
Links::~Links() {
    {
        std::lock_guard<std::mutex> guard(lock_);
        ending_ = true;
    }
    wake();
    worker_->thread.join();
    delete worker_;
    for (Peer &peer : peers_)
        if (peer.socket >= 0) close(peer.socket);
    close(bell_[0]);
    close(bell_[1]);
}

void Links::wake() {
    char ring = 0;
    (void)!write(bell_[1], &ring, 1);
}

void Links::send(int rank, Channel channel, Frame frame) {
    Header header{uint32_t(channel), 0, frame.call, frame.bytes.size()};
    Bytes head(sizeof header);
    memcpy(head.data(), &header, sizeof header);
    {
        std::lock_guard<std::mutex> guard(lock_);
        Peer &peer = peers_[rank];
        peer.out.push_back(std::move(head));
        if (!frame.bytes.empty()) peer.out.push_back(std::move(frame.bytes));
        write_to(peer);
        if (peer.out.empty()) return;
    }
    wake();
}

bool Links::receive(int rank, Channel channel, Frame &frame, double timeout_s) {
    std::unique_lock<std::mutex> guard(lock_);
    auto &frames = peers_[rank].arrived[channel];
    if (!news_.wait_for(guard, std::chrono::duration<double>(timeout_s), [&] { return !frames.empty(); })) return false;
    frame = std::move(frames.front());
    frames.pop_front();
    return true;
}

bool Links::is_lost(int rank) {
    std::lock_guard<std::mutex> guard(lock_);
    return peers_[rank].lost;
}

void Links::move() {
    for (;;) {
        std::vector<pollfd> watched{{bell_[0], POLLIN, 0}};
        std::vector<size_t> ranks;
        {
            std::lock_guard<std::mutex> guard(lock_);
            bool has_more = false;
            for (size_t rank = 0; rank < peers_.size(); ++rank) {
                Peer &peer = peers_[rank];
                if (peer.socket < 0 || peer.lost) continue;
                has_more |= !peer.out.empty();
                watched.push_back({peer.socket, short(POLLIN | (peer.out.empty() ? 0 : POLLOUT)), 0});
                ranks.push_back(rank);
            }
            if (ending_ && !has_more) return;
        }
        poll(watched.data(), watched.size(), -1);
        char rings[64];
        while (read(bell_[0], rings, sizeof rings) > 0) {
        }
        std::lock_guard<std::mutex> guard(lock_);
        for (size_t i = 0; i < ranks.size(); ++i) {
            if (watched[i + 1].revents & POLLOUT) write_to(peers_[ranks[i]]);
            if (watched[i + 1].revents & ~POLLOUT) read_from(peers_[ranks[i]]);
        }
    }
}

void Links::write_to(Peer &peer) {
    while (!peer.out.empty()) {
        Bytes &next = peer.out.front();
        ssize_t sent = ::send(peer.socket, next.data() + peer.out_at, next.size() - peer.out_at, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN && errno != EINTR) peer.out.clear(), peer.out_at = 0, peer.lost = true;
            return;
        }
        peer.out_at += size_t(sent);
        if (peer.out_at == next.size()) peer.out.pop_front(), peer.out_at = 0;
    }
}

void Links::read_from(Peer &peer) {
    for (;;) {
        ssize_t got = recv(peer.socket, peer.in.data() + peer.in_at, peer.in.size() - peer.in_at, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
            peer.lost = true;
            peer.out.clear();
            news_.notify_all();
            return;
        }
        if (got < 0) return;
        peer.in_at += size_t(got);
        if (peer.in_at == peer.in.size()) take_frame(peer);
    }
}

// `in` holds a whole header, or a header and its bytes.
void Links::take_frame(Peer &peer) {
    Header header;
    memcpy(&header, peer.in.data(), sizeof header);
    if (peer.in.size() < sizeof header + header.bytes) {
        peer.in.resize(sizeof header + header.bytes);
        return;
    }
    Frame frame{header.call, Bytes(peer.in.begin() + sizeof header, peer.in.end())};
    peer.arrived[Channel(header.channel)].push_back(std::move(frame));
    peer.in.resize(sizeof header);
    peer.in_at = 0;
    news_.notify_all();
}

// --- doors ---

static int poll_until(int socket, short events, double deadline_s) {
    double left_s = deadline_s - clock_s();
    pollfd watched{socket, events, 0};
    return left_s > 0 ? poll(&watched, 1, int(left_s * 1e3) + 1) : 0;
}

static sockaddr_in place(const std::string &address, int port) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(uint16_t(port));
    inet_pton(AF_INET, address.c_str(), &at.sin_addr);
    return at;
}

static int make_socket() {
    int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return made;
}

int listen_at(const std::string &address, int first_port, int ports, int &port) {
    for (port = first_port; port < first_port + ports; ++port) {
        int made = make_socket();
        sockaddr_in at = place(address, port);
        if (!bind(made, reinterpret_cast<sockaddr *>(&at), sizeof at) && !listen(made, 1024)) {
            socklen_t size = sizeof at;
            getsockname(made, reinterpret_cast<sockaddr *>(&at), &size);
            port = ntohs(at.sin_port);
            return made;
        }
        close(made);
    }
    return -1;
}

int accept_until(int listener, double deadline_s) {
    if (poll_until(listener, POLLIN, deadline_s) <= 0) return -1;
    int got = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), on = 1;
    setsockopt(got, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return got;
}

// The other side may not listen yet, or not be reachable yet: tried until the deadline.
int connect_until(const std::string &address, int port, double deadline_s) {
    while (clock_s() < deadline_s) {
        int made = make_socket();
        fcntl(made, F_SETFL, O_NONBLOCK);
        sockaddr_in at = place(address, port);
        int problem = connect(made, reinterpret_cast<sockaddr *>(&at), sizeof at) ? errno : 0;
        if (problem == EINPROGRESS && poll_until(made, POLLOUT, deadline_s) > 0) {
            socklen_t size = sizeof problem;
            getsockopt(made, SOL_SOCKET, SO_ERROR, &problem, &size);
        }
        if (!problem) {
            fcntl(made, F_SETFL, 0);
            return made;
        }
        close(made);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return -1;
}

bool send_all(int socket, const Bytes &bytes, double deadline_s) {
    for (size_t at = 0; at < bytes.size();) {
        if (poll_until(socket, POLLOUT, deadline_s) <= 0) return false;
        ssize_t sent = ::send(socket, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno != EAGAIN && errno != EINTR) return false;
        at += sent > 0 ? size_t(sent) : 0;
    }
    return true;
}

bool receive_all(int socket, Bytes &bytes, double deadline_s) {
    for (size_t at = 0; at < bytes.size();) {
        if (poll_until(socket, POLLIN, deadline_s) <= 0) return false;
        ssize_t got = recv(socket, bytes.data() + at, bytes.size() - at, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return false;
        at += got > 0 ? size_t(got) : 0;
    }
    return true;
}

}  // namespace sim
