// The thread that beats.
#include "heartbeat.h"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace hvdkit {
namespace {

// More than comes between two looks. What is left is seen at the next one, so nobody can keep the thread busy.
constexpr std::size_t kHeardBytes = 256;

bool only_later() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

struct Heartbeat::Beating {
    Beating(Counter* all, std::size_t mine, std::vector<Connection> to, double seconds)
        : counters(all), me(mine), connections(std::move(to)), interval(seconds), thread([this] { run(); }) {}

    void run() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for Python's threads
        std::unique_lock<std::mutex> lock(mutex);
        do {
            count(me);
            for (Connection& connection : connections) exchange(connection);
        } while (!changed.wait_for(lock, interval, [this] { return stopped; }));
    }

    void count(std::size_t rank) { counters[rank].value.fetch_add(1, std::memory_order_release); }

    void exchange(Connection& connection) {
        auto& [socket, rank] = connection;
        if (socket < 0) return;
        const char sign = 1;
        char heard[kHeardBytes];
        // Where the other end has stopped reading there is no room at some time, and nothing is sent until there is.
        bool good = ::send(socket, &sign, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1 || only_later();
        const ssize_t came = ::recv(socket, heard, sizeof heard, MSG_DONTWAIT);
        if (came > 0) count(rank);
        good = good && (came > 0 || (came < 0 && only_later()));
        if (!good) close(socket);
    }

    static void close(int& socket) {
        ::close(socket);
        socket = -1;
    }

    void stop() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            stopped = true;
        }
        changed.notify_one();
        thread.join();
        for (auto& [socket, rank] : connections) {
            if (socket >= 0) close(socket);
        }
    }

    Counter* const counters;
    const std::size_t me;
    std::vector<Connection> connections;
    const std::chrono::duration<double> interval;
    std::mutex mutex;
    std::condition_variable changed;
    bool stopped = false;
    std::thread thread;  // the last one: it uses the others
};

Heartbeat::Heartbeat(Counter* counters, std::size_t ranks, std::size_t me, std::vector<Connection> connections,
                     double seconds)
    : own_(counters == nullptr ? ranks : 0),
      counters_(counters == nullptr ? own_.data() : counters),
      ranks_(ranks),
      process_(getpid()),
      beating_(std::make_unique<Beating>(counters_, me, std::move(connections), seconds)) {}

Heartbeat::~Heartbeat() { stop(); }

void Heartbeat::stop() {
    if (beating_ == nullptr) return;
    if (getpid() != process_) {
        // The thread is not here, but its lock may be held and its wait begun for ever: even to destroy them would
        // block.
        static_cast<void>(beating_.release());
        return;
    }
    beating_->stop();
    beating_.reset();
}

}  // namespace hvdkit
