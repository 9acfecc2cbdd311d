// Operations that the ranks of a node begin in one order: each is a turn, at which all ranks meet.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../kernels/csrc/kernels.h"
#include "shared.h"

namespace hvdkit {

// Memory that the ranks of one group of a node share. At each turn a rank publishes the description of its operation,
// and its part of a small operation. When all ranks have arrived, each compares the descriptions and reads the parts.
//
// A rank may withdraw a turn at which not all have arrived: it ends for all ranks without a result. A turn is either
// complete or withdrawn, and all ranks see which.
class Turns {
 public:
    static constexpr std::size_t kWords = 6;     // of a description
    static constexpr std::size_t kCompared = 4;  // the first words, which are equal on all ranks
    using Words = std::array<std::uint64_t, kWords>;
    enum class State { busy = 0, open = 1, complete = 2, withdrawn = 3, different = 4 };

    static std::size_t bytes_needed(std::size_t ranks, std::size_t most_bytes);

    // ``base``: that many bytes of shared memory, zeros at first. ``bells``: of the group's ranks.
    Turns(std::byte* base, std::size_t ranks, std::size_t me, std::size_t most_bytes, std::vector<Bell*> bells);

    std::size_t ranks() const { return ranks_; }
    std::size_t most_bytes() const { return most_bytes_; }

    // Publishes this rank's description and part; turns count from 1. ``busy``: others still read what this rank
    // published two turns ago; nothing has happened. Else ``open`` or ``withdrawn``.
    State arrive(std::uint64_t turn, const Words& words, const std::byte* source, std::size_t nbytes);
    // ``open`` after ``seconds``.
    State wait(std::uint64_t turn, double seconds) const;
    // The ranks that have not arrived at a turn that is open, or may not have; none if it is not open.
    std::vector<std::size_t> absent(std::uint64_t turn) const;

    // Of a complete turn: a rank's description, whether all are alike, and a rank's part.
    Words words(std::uint64_t turn, std::size_t rank) const { return notice(turn, rank).words; }
    bool alike(std::uint64_t turn) const;
    std::byte* part(std::uint64_t turn, std::size_t rank) const;

    // This rank reads nothing of this turn any more.
    void finish(std::uint64_t turn);
    // The ranks that may still read.
    std::vector<std::size_t> readers(std::uint64_t turn) const;

    void withdraw(std::uint64_t turn);

    // Ranks are rung when all have arrived, or one has finished, only while some rank watches: 1 begins it, -1 ends it.
    // A rank that watches looks once more before it sleeps.
    void watch(int change) { watchers().value.fetch_add(static_cast<std::uint64_t>(change)); }

    // This rank is at no turn and will be at none. True for the last one: nobody needs the memory any more.
    bool leave();

 private:
    // Of two turns that follow each other the second may begin while ranks still look at the first.
    static constexpr std::size_t kTurns = 2;

    struct alignas(kLine) Notice {
        Words words;
        std::atomic<std::uint64_t> turn;
    };

    std::atomic<std::uint64_t>& state(std::uint64_t turn) const;
    Counter& counter(std::size_t index) const { return reinterpret_cast<Counter*>(base_)[index]; }
    Counter& completed() const { return counter(1 + kTurns); }
    Counter& watchers() const { return counter(2 + kTurns); }
    Counter& finished(std::size_t rank) const { return counter(3 + kTurns + rank); }
    Notice& notice(std::uint64_t turn, std::size_t rank) const;
    void ring_watchers() const;

    std::byte* base_;
    std::size_t ranks_;
    std::size_t me_;
    std::size_t most_bytes_;
    std::vector<Bell*> bells_;
    std::uint64_t read_[kTurns] = {};  // the last turns, by their parity, that this rank finished
};

}  // namespace hvdkit
