// Block layout of attention_hopper.cu: its tile shape, and the ring buffers in shared memory
// between producer and consumers.
#pragma once

#include "attention/attention_hopper.cuh"
#include "attention/attention_units.cuh"
#include "common.cuh"

namespace attention {

template <typename Element_, int HEAD_DIM_>
struct HopperShape {
    using Element = Element_;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int HEADS = 1;  // KV heads per unit
    static constexpr int ROWS = 128;
    static constexpr int KEYS = 128;
    static constexpr int UNITS = 4;         // in the ring of units
    static constexpr int QUERY_STAGES = 2;  // units whose queries are in shared memory
    static constexpr int KEY_STAGES = 3;    // tiles
    static constexpr int VALUE_STAGES = 2;
    static constexpr int GROUPS = 2;  // consumer warpgroups, 64 rows each
    static constexpr int GROUP_ROWS = ROWS / GROUPS;
    static constexpr int THREADS = 128 * (GROUPS + 1);

    static constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes, in a row
    // Tiles consist of atoms of 8 rows x 64 columns, those of the same rows adjacent, so that one
    // TMA copy writes a block of the cache.
    static constexpr int PIECE_BYTES = 1024;
    static constexpr int EIGHT_ROWS_BYTES = HEAD_DIM * 16;
    static constexpr int ROW_BYTES = HEAD_DIM * 2;
    static constexpr int TILE_BYTES = KEYS * ROW_BYTES;
    static constexpr int SHARED_BYTES =
        (QUERY_STAGES + KEY_STAGES + VALUE_STAGES) * TILE_BYTES + 1024;  // to align

    static_assert(ROWS == KEYS, "queries have the layout of a tile of keys");
    static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "of which there are instructions here");

    static __device__ __forceinline__ int kv_head(const Unit& unit) { return unit.head; }

    // Offset of a chunk of a tile.
    static __device__ __forceinline__ int place(int row, int chunk) {
        return row / 8 * EIGHT_ROWS_BYTES + chunk / 8 * PIECE_BYTES +
               hopper::swizzle(row % 8, chunk % 8);
    }
};

// Registers per producer and consumer thread: in total no more than at launch.
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = 232;
constexpr int QUERY_THREADS = 64;

template <class S>
struct SharedStorage {
    unsigned char* queries;  // [QUERY_STAGES], a tile each
    unsigned char* keys;     // [KEY_STAGES]
    unsigned char* values;   // [VALUE_STAGES]
    Unit* units;             // [UNITS]
    int* totals;             // [UNITS] tiles of the step
    bool* is_last;
    // Barriers by unit or stage: `empty` awaited by the producer, `full` by the consumers.
    unsigned unit_full, unit_empty, q_full, q_empty;
    unsigned k_full, k_empty, v_full, v_empty;
};

// Marks a value as warp-uniform for the compiler.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(FULL_WARP, value, 0); }

// Index and phase parity in a ring of SIZE stages.
template <int SIZE>
struct PipelineState {
    int index = 0;
    unsigned parity = 0;

    __device__ __forceinline__ unsigned of(unsigned barriers) const { return barriers + 8 * index; }
    __device__ __forceinline__ void advance() {
        if (++index == SIZE) {
            index = 0;
            parity ^= 1;
        }
    }
};

}  // namespace attention
