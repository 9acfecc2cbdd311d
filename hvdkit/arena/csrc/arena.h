// Memory for gradients that other ranks of the node can map: blocks of one memory file, of one process, for its life.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hvdkit {

struct ArenaCounts {
    std::size_t served;     // allocations that got a block
    std::size_t refused;    // allocations that wanted one when there was no room
    std::size_t used;       // bytes in blocks
    std::size_t populated;  // bytes that the system has given, used or not
};

// Addresses are reserved once, and file and addresses correspond byte for byte. All lists lie in this process's own
// memory: no write of a peer reaches them. Blocks begin on pages, so one can be taken out of the file alone.
//
// Any tensor may live here for as long as the process does, and be freed by any thread at any time, also at the end:
// there is one arena, and it is never destroyed.
class Arena {
 public:
    static Arena& process();

    // Makes the file and reserves addresses, once. Returns why that cannot be; nothing where it is done.
    std::string open();
    bool is_open() const { return base_.load(std::memory_order_acquire) != nullptr; }
    int descriptor() const { return descriptor_; }
    std::byte* base() const { return base_.load(std::memory_order_acquire); }

    // Sizes of allocations that are served, each as often as it was added.
    void add_size(std::size_t nbytes);
    void remove_size(std::size_t nbytes);

    // A block for ``nbytes`` bytes, or null: not one of the sizes, no room, a fork, a page is smaller than alignment.
    void* allocate(std::size_t alignment, std::size_t nbytes);
    // Whether an address is one of the arena's. Costs two comparisons.
    bool contains(const void* address) const {
        const auto* const at = static_cast<const std::byte*>(address);
        const std::byte* const base = base_.load(std::memory_order_acquire);
        return base != nullptr && at >= base && at < base + bytes_;
    }
    // Gives a block back; one that is pinned when nobody pins it any more.
    void free(void* address);

    // Keeps the block that holds these bytes, whoever frees it, until ``unpin``. The offset of ``address`` in the file,
    // or -1 where the bytes are in no block that peers can reach.
    std::int64_t pin(std::uintptr_t address, std::size_t nbytes);
    void unpin(std::int64_t offset);
    // Moves the block at an offset out of the file: same address, same bytes, but no peer's write reaches it any more.
    // Its place in the file is not used again. Throws std::system_error.
    void make_private(std::int64_t offset);

    // A step is over: memory that no step has needed for a while goes back to the system.
    void end_step();
    // All that no block needs goes back to the system now.
    void trim();

    ArenaCounts counts();

 private:
    struct Block {
        std::size_t nbytes;
        unsigned pins = 0;
        bool freed = false;
        bool is_private = false;
    };
    struct Free {
        std::size_t nbytes;
        bool populated;
    };
    using Blocks = std::map<std::size_t, Block>;

    Arena() = default;
    Blocks::iterator block_at(std::size_t offset);
    bool take(std::size_t nbytes, std::size_t* offset);
    bool grow(std::size_t nbytes, std::size_t* offset);
    bool populate(std::size_t offset, std::size_t nbytes);
    void release(Blocks::iterator block);
    void insert_free(std::size_t offset, Free range);
    void erase_free(std::map<std::size_t, Free>::iterator range);
    void give_back(std::size_t keep);
    void copy_for_forks();
    void drop_copy();
    void take_copy();
    static void before_fork();
    static void after_fork_in_parent();
    static void after_fork_in_child();

    std::mutex mutex_;
    std::atomic<std::byte*> base_{nullptr};
    std::size_t bytes_ = 0;
    std::size_t page_ = 0;
    int descriptor_ = -1;
    bool forked_ = false;  // this process is a child of the one that made the file: it sees copies, and makes no blocks
    std::unordered_map<std::size_t, unsigned> sizes_;
    Blocks blocks_;
    std::map<std::size_t, Free> free_;                             // by offset; neighbours of one kind are one
    std::set<std::pair<std::size_t, std::size_t>> free_by_bytes_;  // populated ones
    std::size_t served_ = 0;
    std::size_t refused_ = 0;
    std::size_t used_ = 0;
    std::size_t populated_ = 0;
    std::size_t reached_ = 0;  // offsets from here on were never used
    // Where blocks are copied before a fork, at the same offsets, for the child; null where there is no copy.
    std::byte* copy_ = nullptr;
    std::size_t copy_bytes_ = 0;
    std::size_t peak_ = 0;  // of ``used_`` since the last look
    unsigned steps_ = 0;    // since then
};

}  // namespace hvdkit
