// What a block of attention_hopper.cu is made of: its shape, and the rings in its shared memory,
// through which the threads that feed and those that multiply speak.
#pragma once

#include "attention/attention_hopper.cuh"
#include "attention/attention_units.cuh"
#include "common.cuh"

namespace attention {

template <typename Element_, int HEAD_DIM_>
struct HopperShape {
    using Element = Element_;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int HEADS = 1;  // KV heads of a unit
    static constexpr int ROWS = 128;
    static constexpr int KEYS = 128;
    static constexpr int UNITS = 4;         // that the block knows
    static constexpr int QUERY_STAGES = 2;  // units whose queries are in shared memory
    static constexpr int KEY_STAGES = 3;    // tiles
    static constexpr int VALUE_STAGES = 2;
    static constexpr int GROUPS = 2;  // that multiply, 64 rows each
    static constexpr int GROUP_ROWS = ROWS / GROUPS;
    static constexpr int THREADS = 128 * (GROUPS + 1);

    static constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes, in a row
    // Tiles lie in pieces of 8 rows x 64 columns, the 64s of the same rows next to each other: so
    // the copy engine writes a block of the cache at once.
    static constexpr int PIECE_BYTES = 1024;
    static constexpr int EIGHT_ROWS_BYTES = HEAD_DIM * 16;
    static constexpr int ROW_BYTES = HEAD_DIM * 2;
    static constexpr int TILE_BYTES = KEYS * ROW_BYTES;
    static constexpr int SHARED_BYTES =
        (QUERY_STAGES + KEY_STAGES + VALUE_STAGES) * TILE_BYTES + 1024;  // to align

    static_assert(ROWS == KEYS, "queries lie like a tile of keys");
    static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "of which there are instructions here");

    static __device__ __forceinline__ int kv_head(const Unit& unit) { return unit.head; }

    // Where a chunk of a tile is.
    static __device__ __forceinline__ int place(int row, int chunk) {
        return row / 8 * EIGHT_ROWS_BYTES + chunk / 8 * PIECE_BYTES +
               hopper::swizzle(row % 8, chunk % 8);
    }
};

// Of the threads that feed and of those that multiply: together no more than at the start.
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
    // Of barriers, by unit or stage: `free` for the feeders, the others for those who read.
    unsigned unit_full, unit_empty, q_full, q_empty;
    unsigned k_full, k_empty, v_full, v_empty;
};

// Tells the compiler that a value is the same for the whole warp, so that what depends on it can be
// computed once.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(FULL_WARP, value, 0); }

// A place in a ring of SIZE, and how often, even or odd, it came round.
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
