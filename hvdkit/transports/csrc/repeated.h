// Small allreduces that come again: agreed on and reduced by the ranks of one node alone, below Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../kernels/csrc/kernels.h"
#include "shared.h"

namespace hvdkit {

// Memory that the ranks of one group of a node share, with a place for each operation that comes again.
//
// Ranks count their calls of it: a call's number is its turn, the same on all ranks. What all ranks ask for within
// moments is done here. Who has waited too long, or takes part in another way, withdraws the turn for all ranks: they
// ask the coordinator, who knows what to do about a rank that is late, lost, or asks for something else. So nobody
// waits here for long, and a turn ends in one way on all ranks.
class Repeated {
 public:
    static std::size_t bytes_needed(std::size_t ranks, std::size_t places, std::size_t most_bytes);

    // ``base``: that many bytes of shared memory, zeros at first.
    Repeated(std::byte* base, std::size_t ranks, std::size_t me, std::size_t places, std::size_t most_bytes);

    std::size_t places() const { return read_[0].size(); }
    std::size_t most_bytes() const { return most_bytes_; }

    // This rank's part, up to what the others read. False where the turn was withdrawn. Turns count from 1.
    bool arrive(std::size_t place, std::uint64_t turn, const std::byte* source, std::size_t nbytes, double seconds);
    // How the turn ended; ``open`` after ``seconds``, in which nobody withdraws it.
    enum class State { open, complete, withdrawn };
    State wait(std::size_t place, std::uint64_t turn, double seconds) const;
    // ``target`` gets the reduction of what all ranks brought, in rank order, to a turn that is complete.
    void reduce(std::size_t place, std::uint64_t turn, DType dtype, Op op, Scale scale, std::byte* target,
                std::size_t count);

    // This rank takes part in the turn in another way.
    void withdraw(std::size_t place, std::uint64_t turn);

    // This rank is in no turn and will be in none. True for the last one: nobody needs the memory any more.
    bool leave();

 private:
    // Of two turns that follow each other the second may begin while ranks still look at the first.
    static constexpr std::size_t kTurns = 2;

    std::atomic<std::uint64_t>& state(std::size_t place, std::uint64_t turn) const;
    Counter& completed(std::size_t place) const;
    Counter& finished(std::size_t place, std::size_t rank) const;
    std::byte* slot(std::size_t place, std::uint64_t turn, std::size_t rank) const;
    bool await_readers(std::size_t place, std::uint64_t turn, double seconds) const;
    std::size_t place_bytes() const;

    Counter& left_;  // how many ranks have left
    std::byte* base_;
    std::size_t ranks_;
    std::size_t me_;
    std::size_t most_bytes_;
    // The last turns of each place, by their parity, in which this rank's slot was read.
    std::vector<std::uint64_t> read_[kTurns];
};

}  // namespace hvdkit
