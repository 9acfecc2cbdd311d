// Tagged messages between the ranks of a node: each pair has a ring of bytes for data and one for control messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "shared.h"

namespace hvdkit {

// One direction of one pair; ``capacity`` bytes of ring follow. Positions count up for ever.
struct RingHead {
    alignas(kLine) std::atomic<std::uint64_t> written;  // by the sender
    alignas(kLine) std::atomic<std::uint64_t> read;     // by the receiver
    alignas(kLine) std::atomic<std::uint32_t> starved;  // the sender wants to be rung when there is room
};

// A send or a receive. ``keep`` holds the buffer's owner; it is given back by ``MessageRings::take_finished`` only.
struct Message {
    std::atomic<bool> done{false};
    std::atomic<int> source{-1};                // of a receive from any of several peers, once a message has come
    bool claimed = false;                       // a receive that has its message, or wants none any more
    std::atomic<std::int64_t> wrong_bytes{-1};  // of a message that has another length than its receive
    std::shared_ptr<void> keep;
};

class MessageRings {
 public:
    static std::size_t bytes_needed(std::size_t ranks, std::size_t data_capacity, std::size_t control_capacity);

    // ``base``: shared memory of that many bytes, zeros at first. ``bells``: each rank's.
    MessageRings(std::byte* base, std::size_t ranks, std::size_t me, std::size_t data_capacity,
                 std::size_t control_capacity, std::vector<Bell*> bells);

    // Messages match by (peer, tag) in the order in which they were posted.
    std::shared_ptr<Message> send(std::size_t peer, std::uint64_t tag, const std::byte* data, std::size_t nbytes,
                                  std::shared_ptr<void> keep);
    std::shared_ptr<Message> receive(std::size_t peer, std::uint64_t tag, std::byte* data, std::size_t nbytes,
                                     std::shared_ptr<void> keep);
    // From the first of ``peers`` whose message under this tag comes.
    std::shared_ptr<Message> receive_any(const std::vector<std::size_t>& peers, std::uint64_t tag, std::byte* data,
                                         std::size_t nbytes, std::shared_ptr<void> keep);
    // Takes a receive back for which no message has come. False if one has.
    bool withdraw(Message& receive);
    void send_control(std::size_t peer, std::string payload);

    // Moves all that can be moved now. True if anything was.
    bool progress();

    std::vector<std::pair<std::size_t, std::string>> take_control();
    // Messages that are over, so that their buffers' owners are given back by a thread that may.
    std::vector<std::shared_ptr<Message>> take_finished();

 private:
    struct Outgoing {
        std::uint64_t tag;
        const std::byte* data;
        std::size_t nbytes;
        std::size_t sent;
        std::shared_ptr<Message> message;  // none for a control message,
        std::string payload;               // which is here
    };
    struct Incoming {
        std::byte* data;
        std::size_t nbytes;
        std::shared_ptr<Message> message;
    };
    // What is coming in on one ring: a message of which ``got`` bytes are here.
    struct Arriving {
        bool active = false;
        std::uint64_t tag = 0;
        std::size_t total = 0;
        std::size_t got = 0;
        std::byte* data = nullptr;  // the buffer of a receive that was posted, else ``early``
        std::shared_ptr<Message> message;
        std::string early;
    };
    struct Lane {
        RingHead* out;
        RingHead* in;
        std::size_t capacity;
        std::deque<Outgoing> outgoing;
        Arriving arriving;
    };
    struct Peer {
        Lane data;
        Lane control;
        std::map<std::uint64_t, std::deque<Incoming>> posted;
        std::map<std::uint64_t, std::deque<std::string>> early;  // came before they were asked for
    };

    bool receive_early(std::size_t peer, std::uint64_t tag, std::byte* data, std::size_t nbytes,
                       const std::shared_ptr<Message>& message);
    RingHead* head(std::size_t from, std::size_t to, bool control) const;
    bool push(Lane& lane);
    bool pull(std::size_t from, Lane& lane, bool control);
    void begin(std::size_t from, Arriving& arriving, bool control);
    static void begin_early(Arriving& arriving);
    static void claim(Message& receive, std::size_t from, std::size_t came, std::size_t expected);
    void end(std::size_t from, Arriving& arriving, bool control);

    std::byte* base_;
    std::size_t ranks_;
    std::size_t me_;
    std::size_t data_capacity_;
    std::size_t control_capacity_;
    std::vector<Bell*> bells_;
    std::vector<Peer> peers_;
    std::vector<std::pair<std::size_t, std::string>> control_;
    std::vector<std::shared_ptr<Message>> finished_;
    std::mutex mutex_;
};

}  // namespace hvdkit
