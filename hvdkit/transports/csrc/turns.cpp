// A turn's state is one word: its number, whether it was withdrawn, and how many ranks have arrived. It is changed by
// compare and exchange alone, so that a turn is either complete or withdrawn, and all ranks see which.
#include "turns.h"

#include <cstring>
#include <utility>

namespace hvdkit {
namespace {

constexpr std::uint64_t kWithdrawn = 1ull << 15;
constexpr std::uint64_t kArrived = kWithdrawn - 1;
constexpr unsigned kTurnShift = 16;
constexpr int kLooks = 64;  // between two looks at the clock

std::size_t up_to_lines(std::size_t nbytes) { return (nbytes + kLine - 1) / kLine * kLine; }

}  // namespace

std::size_t Turns::bytes_needed(std::size_t ranks, std::size_t most_bytes) {
    const std::size_t counters = 3 + kTurns + ranks;
    return counters * sizeof(Counter) + kTurns * ranks * (sizeof(Notice) + up_to_lines(most_bytes));
}

Turns::Turns(std::byte* base, std::size_t ranks, std::size_t me, std::size_t most_bytes, std::vector<Bell*> bells)
    : base_(base), ranks_(ranks), me_(me), most_bytes_(up_to_lines(most_bytes)), bells_(std::move(bells)) {}

std::atomic<std::uint64_t>& Turns::state(std::uint64_t turn) const { return counter(1 + turn % kTurns).value; }

Turns::Notice& Turns::notice(std::uint64_t turn, std::size_t rank) const {
    std::byte* const notices = base_ + (3 + kTurns + ranks_) * sizeof(Counter);
    return reinterpret_cast<Notice*>(notices)[turn % kTurns * ranks_ + rank];
}

std::byte* Turns::part(std::uint64_t turn, std::size_t rank) const {
    std::byte* const parts = reinterpret_cast<std::byte*>(&notice(0, 0) + kTurns * ranks_);
    return parts + (turn % kTurns * ranks_ + rank) * most_bytes_;
}

// Sequentially consistent on both sides: either the watcher sees what was done before this, or this sees the watcher.
void Turns::ring_watchers() const {
    if (watchers().value.load() == 0) return;
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
        if (rank != me_) bells_[rank]->ring();
    }
}

std::vector<std::size_t> Turns::readers(std::uint64_t turn) const {
    std::vector<std::size_t> behind;
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
        if (rank != me_ && finished(rank).get() < turn) behind.push_back(rank);
    }
    return behind;
}

Turns::State Turns::arrive(std::uint64_t turn, const Words& words, const std::byte* source, std::size_t nbytes) {
    const std::uint64_t read = read_[turn % kTurns];
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
        if (rank != me_ && finished(rank).get() < read) return State::busy;
    }
    std::atomic<std::uint64_t>& word = state(turn);
    std::uint64_t seen = word.load(std::memory_order_acquire), wanted = 0;
    if (seen >> kTurnShift > turn || (seen >> kTurnShift == turn && (seen & kWithdrawn) != 0)) return State::withdrawn;
    if (nbytes > 0) std::memcpy(part(turn, me_), source, nbytes);
    Notice& own = notice(turn, me_);
    own.words = words;
    own.turn.store(turn, std::memory_order_release);
    do {
        const std::uint64_t there = seen >> kTurnShift;
        if (there > turn || (there == turn && (seen & kWithdrawn) != 0)) return State::withdrawn;
        wanted = there == turn ? seen + 1 : (turn << kTurnShift) + 1;
    } while (!word.compare_exchange_weak(seen, wanted, std::memory_order_seq_cst, std::memory_order_acquire));
    if ((wanted & kArrived) == ranks_) ring_watchers();
    return State::open;
}

Turns::State Turns::wait(std::uint64_t turn, double seconds) const {
    const std::atomic<std::uint64_t>& word = state(turn);
    const std::uint64_t all = (turn << kTurnShift) + ranks_;
    const double deadline = seconds > 0.0 ? monotonic_seconds() + seconds : 0.0;
    for (int look = 1;; ++look) {
        const std::uint64_t seen = word.load(std::memory_order_acquire);
        if (seen == all) {
            completed().set(turn);  // each who sees it, since who did not may be gone
            return State::complete;
        }
        // A later turn is there: who began it has told how this one ended.
        if (seen >> kTurnShift != turn) return completed().get() == turn ? State::complete : State::withdrawn;
        if ((seen & kWithdrawn) != 0) return State::withdrawn;
        if (seconds <= 0.0 || (look % kLooks == 0 && monotonic_seconds() > deadline)) return State::open;
        relax();
    }
}

std::vector<std::size_t> Turns::absent(std::uint64_t turn) const {
    std::vector<std::size_t> ranks, others;
    if (wait(turn, 0.0) != State::open) return ranks;
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
        if (notice(turn, rank).turn.load(std::memory_order_acquire) != turn) ranks.push_back(rank);
        if (rank != me_) others.push_back(rank);
    }
    return ranks.empty() ? others : ranks;  // one of the others has published its notice and is not counted yet
}

bool Turns::alike(std::uint64_t turn) const {
    const Words& own = notice(turn, me_).words;
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
        if (std::memcmp(notice(turn, rank).words.data(), own.data(), kCompared * sizeof(own[0])) != 0) return false;
    }
    return true;
}

void Turns::finish(std::uint64_t turn) {
    read_[turn % kTurns] = turn;
    finished(me_).value.store(turn);
    ring_watchers();
}

void Turns::withdraw(std::uint64_t turn) {
    std::atomic<std::uint64_t>& word = state(turn);
    std::uint64_t seen = word.load(std::memory_order_acquire), wanted = 0;
    do {
        const std::uint64_t there = seen >> kTurnShift;
        if (there > turn || (there == turn && (seen & kArrived) == ranks_)) return;
        wanted = (there == turn ? seen : turn << kTurnShift) | kWithdrawn;
    } while (!word.compare_exchange_weak(seen, wanted, std::memory_order_acq_rel, std::memory_order_acquire));
}

bool Turns::leave() { return counter(0).value.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks_; }

}  // namespace hvdkit
