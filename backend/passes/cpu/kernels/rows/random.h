// Random numbers without a state: functions of a request's seed and a token's position.

#pragma once

#include <algorithm>
#include <cstdint>

#include "step/operations.h"

namespace {

// Two numbers of one position must not be related.
constexpr std::uint32_t kTokenStream = 0, kExclusionStream = 1;

// A number in [0, 1) with 53 random bits: Philox4x32-10 (Salmon et al., SC 2011).
inline double philox_uniform(std::uint64_t seed, i64 position, std::uint32_t stream) {
    std::uint32_t c[4] = {std::uint32_t(position), std::uint32_t(std::uint64_t(position) >> 32), stream, 0};
    std::uint32_t k[2] = {std::uint32_t(seed), std::uint32_t(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t p0 = std::uint64_t(0xD2511F53) * c[0], p1 = std::uint64_t(0xCD9E8D57) * c[2];
        const std::uint32_t next[4] = {std::uint32_t(p1 >> 32) ^ c[1] ^ k[0], std::uint32_t(p1),
                                       std::uint32_t(p0 >> 32) ^ c[3] ^ k[1], std::uint32_t(p0)};
        std::copy(next, next + 4, c);
        k[0] += 0x9E3779B9, k[1] += 0xBB67AE85;
    }
    return double(std::uint64_t(c[0]) << 21 | c[1] >> 11) * 0x1p-53;
}

}  // namespace
