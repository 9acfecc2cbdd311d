// Signs of life of this process that do not wait for Python.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "shared.h"

namespace hvdkit {

// Until it is stopped, a thread of its own counts this rank's signs of life where the ranks of its node see them, sends
// a byte over each connection to a rank of another node, and counts what comes from there as a sign of that rank.
//
// Who holds Python's lock does not stop it, who stops or kills the process does. A fork has no such thread, and leaves
// alone what its parent's uses.
class Heartbeat {
 public:
    using Connection = std::pair<int, std::size_t>;  // a connected socket, whose owner this is, and the rank behind it

    // ``counters``: one for each rank of the job, zeros at first; in memory of the node, or null for some of its own.
    Heartbeat(Counter* counters, std::size_t ranks, std::size_t me, std::vector<Connection> connections,
              double seconds);
    ~Heartbeat();
    Heartbeat(const Heartbeat&) = delete;
    Heartbeat& operator=(const Heartbeat&) = delete;

    void stop();
    // How many signs of a rank were counted; 0 if it never gave one.
    std::uint64_t count(std::size_t rank) const { return counters_[rank].get(); }
    std::size_t ranks() const { return ranks_; }

 private:
    struct Beating;

    std::vector<Counter> own_;
    Counter* counters_;
    const std::size_t ranks_;
    const pid_t process_;
    std::unique_ptr<Beating> beating_;
};

}  // namespace hvdkit
