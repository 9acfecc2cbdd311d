// Stands before the C library, as other allocators do, and does the same.
#include <dlfcn.h>

#include <cstddef>
extern "C" int posix_memalign(void** out, std::size_t alignment, std::size_t nbytes) noexcept {
    static auto* const next =
        reinterpret_cast<int (*)(void**, std::size_t, std::size_t)>(dlsym(RTLD_NEXT, "posix_memalign"));
    return next(out, alignment, nbytes);
}
extern "C" void free(void* address) noexcept {
    static auto* const next = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_NEXT, "free"));
    next(address);
}
