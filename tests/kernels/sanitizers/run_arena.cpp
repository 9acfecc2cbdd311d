// The arena, of which there is one in a process: threads that allocate, pass on, pin, move and free.
#include <array>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "../../../hvdkit/arena/csrc/arena.h"
#include "check.h"

namespace {

using hvdkit::Arena;

constexpr std::array<std::size_t, 4> kSizes = {4096, 5000, 65536, 1 << 20};
constexpr std::size_t kThreads = 4;

struct Held {
    unsigned char* data;
    std::size_t nbytes;
    unsigned char value;
};

// A thread frees what others have allocated.
class Shelf {
 public:
    void put(Held held) {
        const std::lock_guard<std::mutex> locked(mutex_);
        held_.push_back(held);
    }
    bool take(Held* held) {
        const std::lock_guard<std::mutex> locked(mutex_);
        if (held_.empty()) return false;
        *held = held_.front();
        held_.pop_front();
        return true;
    }

 private:
    std::mutex mutex_;
    std::deque<Held> held_;
};

void check_and_free(const Held& held) {
    CHECK(held.data[0] == held.value && held.data[held.nbytes / 2] == held.value);
    CHECK(held.data[held.nbytes - 1] == held.value);
    Arena::process().free(held.data);
}

void work(std::uint64_t seed, std::size_t rounds, Shelf* shelf) {
    Arena& arena = Arena::process();
    Random random(seed);
    for (std::size_t round = 0; round < rounds; ++round) {
        const std::size_t nbytes = random.one_of(kSizes);
        auto* const data = static_cast<unsigned char*>(arena.allocate(64, nbytes));
        CHECK(data != nullptr && arena.contains(data));
        const Held mine{data, nbytes, static_cast<unsigned char>(random.bits())};
        std::memset(data, mine.value, nbytes);
        const std::int64_t offset = arena.pin(reinterpret_cast<std::uintptr_t>(data), nbytes);
        CHECK(offset >= 0);
        const bool moves = random.number(0, 9) == 0;
        if (random.number(0, 1) == 0) {
            if (moves) arena.make_private(offset);
            shelf->put(mine);
            arena.unpin(offset);
        } else {
            arena.free(data);  // deferred
            CHECK(data[nbytes - 1] == mine.value);
            if (moves) arena.make_private(offset);
            CHECK(data[0] == mine.value);
            arena.unpin(offset);
        }
        Held another{};
        if (shelf->take(&another)) check_and_free(another);
        if (round % 16 == 0) arena.end_step();
        if (round % 64 == 0) arena.trim();
    }
}

}  // namespace

void run_arena(std::uint64_t seed, std::size_t rounds) {
    Arena& arena = Arena::process();
    CHECK(arena.open().empty());
    for (const std::size_t nbytes : kSizes) arena.add_size(nbytes);
    Shelf shelf;
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([&shelf, seed, thread, rounds] { work(seed + thread, rounds, &shelf); });
    }
    for (std::thread& thread : threads) thread.join();
    Held left{};
    while (shelf.take(&left)) check_and_free(left);
    CHECK(arena.allocate(64, 4097) == nullptr);
    CHECK(arena.counts().used == 0);
    arena.trim();
    CHECK(arena.counts().populated == 0);
    for (const std::size_t nbytes : kSizes) arena.remove_size(nbytes);
    CHECK(arena.allocate(64, kSizes[0]) == nullptr);
}
