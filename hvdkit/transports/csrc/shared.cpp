// Bells: sleeping and waking by futex, between processes.
#include "shared.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cmath>

namespace hvdkit {

void Bell::ring() {
    // Sequentially consistent on both sides: either the sleeper sees the new count, or we see the sleeper.
    rings.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) {
        syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&rings), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
}

void Bell::sleep(std::uint32_t seen, double seconds, double spin_seconds) {
    if (!(seconds > 0.0)) return;
    if (spin_seconds > 0.0) {
        const double until = monotonic_seconds() + spin_seconds;
        do {
            for (int i = 0; i < 32; ++i) {
                if (count() != seen) return;
                relax();
            }
        } while (monotonic_seconds() < until);
    }
    timespec timeout{};
    timeout.tv_sec = static_cast<time_t>(std::floor(seconds));
    timeout.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (rings.load(std::memory_order_seq_cst) == seen) {
        // Whatever it returns (woken, time-out, signal, changed meanwhile), the caller looks again.
        syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&rings), FUTEX_WAIT, seen, &timeout, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

double monotonic_seconds() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace hvdkit
