// The end of a process in which a call of a library may never come back.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace hvdkit {

// From its making until it is cancelled, a thread of its own, which needs nothing of Python, counts the time. When that
// is up, it writes the words to standard error and ends the process with status 1.
class LastResort {
 public:
    LastResort(double seconds, std::string words);
    ~LastResort() { cancel(); }
    LastResort(const LastResort&) = delete;
    LastResort& operator=(const LastResort&) = delete;

    void cancel();

 private:
    void count_down();

    const std::chrono::steady_clock::time_point deadline_;
    const std::string words_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool cancelled_ = false;
    std::thread thread_;
};

}  // namespace hvdkit
