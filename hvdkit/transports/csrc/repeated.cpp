// A turn's state is one word: its number, whether it was withdrawn, and how many ranks have arrived. It is changed by
// compare and exchange alone, so that a turn is either complete or withdrawn, and all ranks see which.
#include "repeated.h"

#include <cstring>

namespace hvdkit {
namespace {

constexpr std::uint64_t kWithdrawn = 1ull << 15;
constexpr std::uint64_t kArrived = kWithdrawn - 1;
constexpr unsigned kTurnShift = 16;
constexpr int kLooks = 64;  // between two looks at the clock

std::size_t up_to_lines(std::size_t nbytes) { return (nbytes + kLine - 1) / kLine * kLine; }

}  // namespace

std::size_t Repeated::bytes_needed(std::size_t ranks, std::size_t places, std::size_t most_bytes) {
    return kLine + places * ((kTurns + 1 + ranks) * kLine + kTurns * ranks * up_to_lines(most_bytes));
}

Repeated::Repeated(std::byte* base, std::size_t ranks, std::size_t me, std::size_t places, std::size_t most_bytes)
    : left_(*reinterpret_cast<Counter*>(base)),
      base_(base + kLine),
      ranks_(ranks),
      me_(me),
      most_bytes_(up_to_lines(most_bytes)) {
    for (auto& turns : read_) turns.resize(places);
}

std::size_t Repeated::place_bytes() const { return bytes_needed(ranks_, 1, most_bytes_) - kLine; }

bool Repeated::leave() { return left_.value.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks_; }

std::atomic<std::uint64_t>& Repeated::state(std::size_t place, std::uint64_t turn) const {
    return reinterpret_cast<Counter*>(base_ + place * place_bytes())[turn % kTurns].value;
}

Counter& Repeated::completed(std::size_t place) const {
    return reinterpret_cast<Counter*>(base_ + place * place_bytes())[kTurns];
}

Counter& Repeated::finished(std::size_t place, std::size_t rank) const {
    return reinterpret_cast<Counter*>(base_ + place * place_bytes())[kTurns + 1 + rank];
}

std::byte* Repeated::slot(std::size_t place, std::uint64_t turn, std::size_t rank) const {
    std::byte* const slots = base_ + place * place_bytes() + (kTurns + 1 + ranks_) * kLine;
    return slots + (turn % kTurns * ranks_ + rank) * most_bytes_;
}

bool Repeated::await_readers(std::size_t place, std::uint64_t turn, double seconds) const {
    const std::uint64_t read = read_[turn % kTurns][place];
    const double deadline = monotonic_seconds() + seconds;
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
        while (rank != me_ && finished(place, rank).get() < read) {
            if (monotonic_seconds() > deadline) return false;
            relax();
        }
    }
    return true;
}

bool Repeated::arrive(std::size_t place, std::uint64_t turn, const std::byte* source, std::size_t nbytes,
                      double seconds) {
    if (!await_readers(place, turn, seconds)) {
        withdraw(place, turn);
        return false;
    }
    std::atomic<std::uint64_t>& word = state(place, turn);
    std::uint64_t seen = word.load(std::memory_order_acquire), wanted = 0;
    if (seen >> kTurnShift > turn || (seen >> kTurnShift == turn && (seen & kWithdrawn) != 0)) return false;
    std::memcpy(slot(place, turn, me_), source, nbytes);
    do {
        const std::uint64_t there = seen >> kTurnShift;
        if (there > turn || (there == turn && (seen & kWithdrawn) != 0)) return false;
        wanted = there == turn ? seen + 1 : (turn << kTurnShift) + 1;
    } while (!word.compare_exchange_weak(seen, wanted, std::memory_order_acq_rel, std::memory_order_acquire));
    return true;
}

Repeated::State Repeated::wait(std::size_t place, std::uint64_t turn, double seconds) const {
    const std::atomic<std::uint64_t>& word = state(place, turn);
    const std::uint64_t all = (turn << kTurnShift) + ranks_;
    const double deadline = monotonic_seconds() + seconds;
    for (int look = 1;; ++look) {
        const std::uint64_t seen = word.load(std::memory_order_acquire);
        if (seen == all) {
            completed(place).set(turn);  // each who sees it, since who did not may be gone
            return State::complete;
        }
        // A later turn is there: who began it has told how this one ended.
        if (seen >> kTurnShift != turn) return completed(place).get() == turn ? State::complete : State::withdrawn;
        if ((seen & kWithdrawn) != 0) return State::withdrawn;
        if (look % kLooks == 0 && monotonic_seconds() > deadline) return State::open;
        relax();
    }
}

void Repeated::reduce(std::size_t place, std::uint64_t turn, DType dtype, Op op, Scale scale, std::byte* target,
                      std::size_t count) {
    Reduction reduction{dtype, dtype, op, scale, count, {target}, {}};
    for (std::size_t rank = 0; rank < ranks_; ++rank) reduction.sources.push_back(slot(place, turn, rank));
    hvdkit::reduce(reduction);
    read_[turn % kTurns][place] = turn;
    finished(place, me_).set(turn);
}

void Repeated::withdraw(std::size_t place, std::uint64_t turn) {
    std::atomic<std::uint64_t>& word = state(place, turn);
    std::uint64_t seen = word.load(std::memory_order_acquire), wanted = 0;
    do {
        const std::uint64_t there = seen >> kTurnShift;
        if (there > turn || (there == turn && (seen & kArrived) == ranks_)) return;
        wanted = (there == turn ? seen : turn << kTurnShift) | kWithdrawn;
    } while (!word.compare_exchange_weak(seen, wanted, std::memory_order_acq_rel, std::memory_order_acquire));
}

}  // namespace hvdkit
