// Counting down to the end of a process.
#include "last_resort.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <utility>

namespace hvdkit {
namespace {

using Clock = std::chrono::steady_clock;

Clock::time_point in(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// A pipe that nobody reads must not keep the process.
constexpr int kPatienceMilliseconds = 1000;

void write_if_read(int descriptor, const std::string& text) {
    pollfd ready{descriptor, POLLOUT, 0};
    if (::poll(&ready, 1, kPatienceMilliseconds) != 1) return;
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    static_cast<void>(written);  // there is nobody left to tell
}

}  // namespace

LastResort::LastResort(double seconds, std::string words)
    : deadline_(in(seconds)), words_(std::move(words)), thread_([this] { count_down(); }) {}

void LastResort::cancel() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        cancelled_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
}

void LastResort::count_down() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for Python's threads
    std::unique_lock<std::mutex> lock(mutex_);
    if (changed_.wait_until(lock, deadline_, [this] { return cancelled_; })) return;
    write_if_read(STDERR_FILENO, words_);
    _exit(1);
}

}  // namespace hvdkit
