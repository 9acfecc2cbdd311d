// What the compiler and the processor offer: one build that runs anywhere, and loops that may be vectorised.
#pragma once

// Several versions of one function in one binary, chosen when the module is loaded. It needs ifunc, thus glibc, and
// sanitizers cannot start before the resolvers run. A build that shall run as an older processor does (tests have such
// ones) defines HVDKIT_CLONES, and HVDKIT_F16C as 0, for the compiler.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HVDKIT_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define HVDKIT_SANITIZED
#endif
#endif
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute) && !defined(HVDKIT_SANITIZED) && \
    !defined(HVDKIT_CLONES)
#if __has_attribute(target_clones)
#define HVDKIT_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#endif
#endif
#ifndef HVDKIT_CLONES
#define HVDKIT_CLONES
#endif
#ifndef HVDKIT_F16C
#define HVDKIT_F16C 1
#endif

// A loop body must be inlined into each clone, or it would run as compiled for the oldest processor.
#define HVDKIT_INLINE inline __attribute__((always_inline))
#define HVDKIT_LAMBDA __attribute__((always_inline))

// Element i depends on elements i only. Without this, a destination that is one of the sources would fail the
// vectoriser's overlap check and run one element at a time.
#if defined(__clang__)
#define HVDKIT_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define HVDKIT_ELEMENTWISE _Pragma("GCC ivdep")
#else
#define HVDKIT_ELEMENTWISE
#endif
