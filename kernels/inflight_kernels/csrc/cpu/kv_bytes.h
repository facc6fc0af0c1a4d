// Keys and values of 8 bits in a layer's cache; torch_ops/kv_quantization.py defines their layout
// and rounding.
#pragma once

#include "vectors.h"

typedef enum { FLOATS, E4M3, INT8 } Cached;

// The blocks of a layer's keys, or values, of 8 bits.
typedef struct {
    uint8_t* blocks;
    int64_t block_stride;  // bytes from one block to the next
    int64_t block_size, heads, dim;
    int64_t cached;  // E4M3 or INT8
} Bytes;

// The bytes of a head of a token.
INLINE uint8_t* bytes_of(const Bytes* all, int64_t block, int64_t offset, int64_t head) {
    return all->blocks + block * all->block_stride + (offset * all->heads + head) * all->dim;
}

// Their scale.
INLINE uint16_t* scale_of(const Bytes* all, int64_t block, int64_t offset, int64_t head) {
    uint8_t* scales =
        all->blocks + block * all->block_stride + all->block_size * all->heads * all->dim;
    return (uint16_t*)scales + head * all->block_size + offset;
}

INLINE float float_of_bits(uint32_t bits) {
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

// The number of a float16 that is not negative.
INLINE float float_of_half(uint16_t half) {
    if (half >= 0x7c00) return float_of_bits(half == 0x7c00 ? 0x7f800000 : 0x7fc00000);
    return float_of_bits((uint32_t)half << 13) * 0x1p112f;
}

// The numbers of LANES bytes. No byte of e4m3 is NaN: a vector that is has such a scale.
INLINE floats numbers_of(const uint8_t* bytes, Cached cached) {
    typedef int8_t codes __attribute__((vector_size(LANES)));
    codes found;
    memcpy(&found, bytes, sizeof found);
    ints wide = __builtin_convertvector(found, ints);
    if (cached == INT8) return __builtin_convertvector(wide, floats);
    // The sign is in all upper bits; the exponent's bias is smaller by 120.
    return (floats)(wide << 20 & (int32_t)0x87f00000) * 0x1p120f;
}
