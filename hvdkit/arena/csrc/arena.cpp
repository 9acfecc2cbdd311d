// Blocks of the arena: best fit among what the system has given already, else more is asked for.
#include "arena.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <system_error>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace hvdkit {
namespace {

// The most that gradients, and what else has their sizes, could take is the machine's memory; addresses cost nothing,
// and more of them than memory leave room for holes.
constexpr std::size_t kAddressesPerByte = 2;
// How many steps a need is remembered, and what is worth giving back.
constexpr unsigned kSteps = 64;
constexpr std::size_t kWorthGivingBack = 16 * 1024 * 1024;
// What is compared at a time, and copied if it differs, before a fork.
constexpr std::size_t kCopied = 256 * 1024;

std::string why(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

}  // namespace

Arena& Arena::process() {
    static auto* const arena = new Arena;  // never destroyed: tensors are freed when everything else is gone
    return *arena;
}

std::string Arena::open() {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (forked_) return "this process is a fork of one that has an arena";
    if (is_open()) return "";
    page_ = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t memory = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * page_;
    const int descriptor = memfd_create("hvdkit-gradients", MFD_CLOEXEC);
    if (descriptor < 0) return why("memfd_create");
    const std::size_t bytes = kAddressesPerByte * memory;
    void* mapped = MAP_FAILED;
    if (ftruncate(descriptor, static_cast<off_t>(bytes)) == 0) {
        mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    }
    if (mapped == MAP_FAILED) {
        const std::string reason = why("a memory file cannot be made or mapped");
        close(descriptor);
        return reason;
    }
    madvise(mapped, bytes, MADV_HUGEPAGE);  // where the system allows it for shared memory; else nothing is lost
    if (pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) != 0) {
        munmap(mapped, bytes);
        close(descriptor);
        return "pthread_atfork failed";
    }
    bytes_ = bytes;
    descriptor_ = descriptor;
    insert_free(0, {bytes, false});
    base_.store(static_cast<std::byte*>(mapped), std::memory_order_release);
    return "";
}

void Arena::add_size(std::size_t nbytes) {
    // glibc serves sizes as large as the largest that was ever freed from its heap, and keeps twice as much there; from
    // the first gradients that a training frees it learns how much. It never sees those that the arena has, so it is
    // shown one: activations of such sizes would go back to the system in each step, and be faulted in page by page.
    void* volatile shown = std::malloc(nbytes);
    std::free(shown);
    const std::lock_guard<std::mutex> locked(mutex_);
    ++sizes_[nbytes];
}

void Arena::remove_size(std::size_t nbytes) {
    const std::lock_guard<std::mutex> locked(mutex_);
    const auto found = sizes_.find(nbytes);
    if (found != sizes_.end() && --found->second == 0) sizes_.erase(found);
}

void* Arena::allocate(std::size_t alignment, std::size_t nbytes) {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (!is_open() || forked_ || alignment > page_ || sizes_.find(nbytes) == sizes_.end()) return nullptr;
    const std::size_t rounded = (nbytes + page_ - 1) / page_ * page_;
    std::size_t offset = 0;
    try {
        if (!take(rounded, &offset) && !grow(rounded, &offset)) {
            ++refused_;
            return nullptr;
        }
        blocks_[offset] = Block{rounded};
    } catch (const std::bad_alloc&) {
        return nullptr;  // whoever asks gets ordinary memory, or the same error from there
    }
    ++served_;
    used_ += rounded;
    peak_ = std::max(peak_, used_);
    return base() + offset;
}

bool Arena::take(std::size_t nbytes, std::size_t* offset) {
    const auto best = free_by_bytes_.lower_bound({nbytes, 0});
    if (best == free_by_bytes_.end()) return false;
    const auto range = free_.find(best->second);
    *offset = range->first;
    const std::size_t left = range->second.nbytes - nbytes;
    erase_free(range);
    if (left > 0) insert_free(*offset + nbytes, {left, true});
    return true;
}

bool Arena::grow(std::size_t nbytes, std::size_t* offset) {
    for (auto range = free_.begin(); range != free_.end(); ++range) {
        if (range->second.populated) continue;
        // What lies free just before it is used too.
        auto first = range;
        std::size_t had = 0;
        if (range != free_.begin()) {
            const auto before = std::prev(range);
            if (before->second.populated && before->first + before->second.nbytes == range->first) {
                first = before;
                had = before->second.nbytes;
            }
        }
        if (had + range->second.nbytes < nbytes) continue;
        const std::size_t begin = first->first;
        const std::size_t middle = range->first;
        const std::size_t more = nbytes - had;
        const std::size_t left = range->second.nbytes - more;
        if (!populate(middle, more)) return false;
        if (first != range) erase_free(first);
        erase_free(range);
        if (left > 0) insert_free(middle + more, {left, false});
        populated_ += more;
        reached_ = std::max(reached_, begin + nbytes);
        *offset = begin;
        return true;
    }
    return false;
}

bool Arena::populate(std::size_t offset, std::size_t nbytes) {
    // To touch memory that the system does not have would be fatal later.
    if (madvise(base() + offset, nbytes, MADV_POPULATE_WRITE) == 0) return true;
    if (errno != EINVAL) return false;  // kernels before 5.14 can only set it aside
    return posix_fallocate(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(nbytes)) == 0;
}

void Arena::free(void* address) {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (forked_) return;  // what the child sees are copies that go with it
    const auto block = blocks_.find(static_cast<std::size_t>(static_cast<std::byte*>(address) - base()));
    if (block == blocks_.end()) return;
    if (block->second.pins > 0) {
        block->second.freed = true;
    } else {
        release(block);
    }
}

void Arena::release(Blocks::iterator block) {
    const std::size_t offset = block->first;
    const std::size_t nbytes = block->second.nbytes;
    used_ -= nbytes;
    if (block->second.is_private) {
        madvise(base() + offset, nbytes, MADV_DONTNEED);  // this range stays out of the file
    } else {
        insert_free(offset, {nbytes, true});
    }
    blocks_.erase(block);
}

void Arena::insert_free(std::size_t offset, Free range) {
    const auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->first == offset + range.nbytes && next->second.populated == range.populated) {
        range.nbytes += next->second.nbytes;
        erase_free(next);
    }
    const auto after = free_.lower_bound(offset);
    if (after != free_.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second.nbytes == offset && before->second.populated == range.populated) {
            offset = before->first;
            range.nbytes += before->second.nbytes;
            erase_free(before);
        }
    }
    free_[offset] = range;
    if (range.populated) free_by_bytes_.emplace(range.nbytes, offset);
}

void Arena::erase_free(std::map<std::size_t, Free>::iterator range) {
    if (range->second.populated) free_by_bytes_.erase({range->second.nbytes, range->first});
    free_.erase(range);
}

Arena::Blocks::iterator Arena::block_at(std::size_t offset) {
    auto block = blocks_.upper_bound(offset);
    if (block == blocks_.begin()) return blocks_.end();
    --block;
    return offset < block->first + block->second.nbytes ? block : blocks_.end();
}

std::int64_t Arena::pin(std::uintptr_t address, std::size_t nbytes) {
    if (!contains(reinterpret_cast<const void*>(address))) return -1;
    const std::lock_guard<std::mutex> locked(mutex_);
    const std::size_t offset = address - reinterpret_cast<std::uintptr_t>(base());
    const auto block = block_at(offset);
    if (forked_ || block == blocks_.end() || block->second.is_private || block->second.freed ||
        offset + nbytes > block->first + block->second.nbytes) {
        return -1;
    }
    ++block->second.pins;
    return static_cast<std::int64_t>(offset);
}

void Arena::unpin(std::int64_t offset) {
    const std::lock_guard<std::mutex> locked(mutex_);
    const auto block = block_at(static_cast<std::size_t>(offset));
    if (forked_ || block == blocks_.end() || block->second.pins == 0) return;
    if (--block->second.pins == 0 && block->second.freed) release(block);
}

void Arena::make_private(std::int64_t offset) {
    const std::lock_guard<std::mutex> locked(mutex_);
    const auto block = block_at(static_cast<std::size_t>(offset));
    if (forked_ || block == blocks_.end() || block->second.is_private) return;
    const std::size_t nbytes = block->second.nbytes;
    std::byte* const at = base() + block->first;
    void* const copy = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    std::memcpy(copy, at, nbytes);
    if (mremap(copy, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) {
        const int error = errno;
        munmap(copy, nbytes);
        throw std::system_error(error, std::generic_category(), "mremap");
    }
    block->second.is_private = true;
    populated_ -= nbytes;
    // A peer that still writes there brings back what it writes to, and nobody looks at it.
    fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(block->first),
              static_cast<off_t>(nbytes));
}

void Arena::end_step() {
    const std::lock_guard<std::mutex> locked(mutex_);
    drop_copy();
    if (++steps_ < kSteps) return;
    const std::size_t needed = peak_;
    steps_ = 0;
    peak_ = used_;
    if (populated_ > needed + std::max(kWorthGivingBack, needed / 8)) give_back(needed);
}

void Arena::trim() {
    const std::lock_guard<std::mutex> locked(mutex_);
    drop_copy();
    give_back(0);
}

// Gives free memory back, the highest first, until no more than ``keep`` bytes are populated.
void Arena::give_back(std::size_t keep) {
    if (forked_) return;
    std::vector<std::pair<std::size_t, std::size_t>> given;
    for (auto range = free_.rbegin(); range != free_.rend() && populated_ > keep; ++range) {
        if (!range->second.populated) continue;
        const std::size_t nbytes = std::min(range->second.nbytes, populated_ - keep);
        const std::size_t rounded = (nbytes + page_ - 1) / page_ * page_;
        const std::size_t begin = range->first + range->second.nbytes - rounded;
        if (fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                      static_cast<off_t>(rounded)) != 0) {
            break;
        }
        populated_ -= rounded;
        given.emplace_back(begin, rounded);
    }
    for (const auto& [begin, nbytes] : given) {
        const auto range = std::prev(free_.upper_bound(begin));
        const std::size_t first = range->first;
        erase_free(range);
        if (begin > first) insert_free(first, {begin - first, true});
        insert_free(begin, {nbytes, false});
    }
}

ArenaCounts Arena::counts() {
    const std::lock_guard<std::mutex> locked(mutex_);
    return {served_, refused_, used_, populated_};
}

// A fork shall have the blocks as they are now, as it has all other memory: the parent, and other ranks, write into the
// file further on. So the parent copies them into memory of its own, which the system copies on write. For the next
// fork before the step is over, as for the next worker, only what differs is copied again, and all forks share the
// rest.
void Arena::copy_for_forks() {
    if (copy_bytes_ < reached_) drop_copy();
    if (reached_ == 0) return;
    if (copy_ == nullptr) {
        void* const mapped =
            mmap(nullptr, reached_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) return;
        copy_ = static_cast<std::byte*>(mapped);
        copy_bytes_ = reached_;
        madvise(copy_, copy_bytes_, MADV_HUGEPAGE);
    }
    for (const auto& [offset, block] : blocks_) {
        if (block.is_private || block.freed) continue;
        for (std::size_t done = 0; done < block.nbytes; done += kCopied) {
            const std::size_t nbytes = std::min(kCopied, block.nbytes - done);
            std::byte* const to = copy_ + offset + done;
            const std::byte* const from = base() + offset + done;
            if (std::memcmp(to, from, nbytes) == 0) continue;
            if (madvise(to, nbytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
                drop_copy();  // there is not enough memory; to touch it would be fatal
                return;
            }
            std::memcpy(to, from, nbytes);
        }
    }
}

void Arena::drop_copy() {
    if (copy_ != nullptr) munmap(copy_, copy_bytes_);
    copy_ = nullptr;
    copy_bytes_ = 0;
}

// In the child: the copy takes the place of the file. Where there was no memory for it, nothing is there to be read.
void Arena::take_copy() {
    std::size_t begin = 0;
    const auto take_until = [&](std::size_t end) {
        if (begin >= end) return;
        std::byte* const at = base() + begin;
        const std::size_t nbytes = end - begin;
        if (copy_ == nullptr ||
            mremap(copy_ + begin, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) {
            mprotect(at, nbytes, PROT_NONE);
        }
    };
    for (const auto& [offset, block] : blocks_) {
        if (!block.is_private) continue;
        take_until(offset);
        begin = offset + block.nbytes;
    }
    take_until(reached_);
    mprotect(base() + reached_, bytes_ - reached_, PROT_NONE);
    drop_copy();  // what lies beside private blocks
}

void Arena::before_fork() {
    Arena& arena = process();
    arena.mutex_.lock();
    if (!arena.forked_ && arena.is_open()) arena.copy_for_forks();
}

void Arena::after_fork_in_parent() { process().mutex_.unlock(); }

void Arena::after_fork_in_child() {
    Arena& arena = process();
    if (!arena.forked_ && arena.is_open()) arena.take_copy();
    arena.forked_ = true;
    arena.mutex_.unlock();
}

}  // namespace hvdkit
