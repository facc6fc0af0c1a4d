// What a block of latent attention has: the shape of its tiles, and its shared memory.
#pragma once

#include "attention/attention_work.cuh"
#include "latent/latent_row.cuh"

namespace attention {

// Tile shape of a block of threads. STAGES tiles of keys are in shared memory. PAIRED: clusters of
// two blocks, which merge a unit of two pieces by way of each other's shared memory.
template <typename Element_, int ROWS_, int STAGES_, bool PAIRED_ = false>
struct LatentShape {
    using Element = Element_;
    static constexpr int ROWS = ROWS_;
    static constexpr int STAGES = STAGES_;
    static constexpr bool PAIRED = PAIRED_;
    static constexpr int HEADS = 1;  // KV heads per unit
    static constexpr int KEYS = 32;
    static constexpr int KEY_DIM = latent::KEY;
    static constexpr int HEAD_DIM = latent::RANK;  // of values and results

    static constexpr int WARPS = 8;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int COPY_KEYS = KEYS / WARPS;  // copied by a warp
    static constexpr bool CROSSES_UNITS = true;

    // Scores of a warp.
    static constexpr int DEPTHS = 4;
    static constexpr int DEPTH = KEY_DIM / DEPTHS;
    static constexpr int ROW_PARTS = ROWS == 16 ? 1 : 2;
    static constexpr int KEY_PARTS = WARPS / DEPTHS / ROW_PARTS;
    static constexpr int SCORE_ROWS = ROWS / ROW_PARTS;
    static constexpr int SCORE_KEYS = KEYS / KEY_PARTS;
    // Queries are kept in registers if they fit.
    static constexpr bool QUERIES_IN_REGISTERS = SCORE_ROWS == 16;

    static constexpr int LANES = THREADS / ROWS;      // threads of a row's softmax
    static constexpr int COLUMNS = HEAD_DIM / WARPS;  // of sums, of a warp

    // 8 elements of padding put the 8 rows of an ldmatrix into different banks.
    static constexpr int PITCH = KEY_DIM + 8;
    static constexpr int TILE = KEYS * PITCH;
    static constexpr int WEIGHT_PITCH = KEYS + 8;

    static_assert(ROWS % 16 == 0 && LANES <= 32 && KEYS % LANES == 0, "a row is in one warp");
    static_assert(DEPTH % 16 == 0 && COLUMNS % 16 == 0, "fragments cover 16 columns at a time");
    static_assert(COPY_KEYS == 4, "8 lanes copy a key");

    // The part of a tile that this warp copies: its keys from here on.
    __device__ __forceinline__ static int first_key() { return threadIdx.x / 32 * COPY_KEYS; }
    __device__ __forceinline__ static int kv_head(const Unit& unit) { return 0; }

    // Rows of q, and this warp's part of them.
    struct QueryRow {
        using Element = Element_;
        static constexpr int HEAD_DIM = KEY_DIM;
        __device__ __forceinline__ static int kv_head(const Unit& unit) { return 0; }
    };
    struct Slice {
        using Element = Element_;
        static constexpr bool QUANTIZED = false;
        static constexpr int HEAD_DIM = DEPTH;
    };
};

// A unit that other blocks process too.
struct Split {
    Unit unit;
    int launch;    // how often this plan's blocks have arrived before
    bool is_last;  // whether this block was the last one to arrive
};

// Layout of shared memory.
template <class S>
struct LatentMemory {
    using T = typename S::Element;
    static constexpr int TILE_BYTES = S::STAGES * S::TILE * 2;
    static constexpr int SCORE_BYTES = S::DEPTHS * S::ROWS * S::KEYS * 4;
    static constexpr int WEIGHT_BYTES = S::ROWS * S::WEIGHT_PITCH * 2;
    static constexpr int QUERY_BYTES = S::QUERIES_IN_REGISTERS ? 0 : S::ROWS * S::PITCH * 2;
    static constexpr int SPLIT_BYTES = 128;
    // Half of the other block's sums, and the states of its rows and of the own ones.
    static constexpr int EXCHANGE_BYTES =
        S::PAIRED ? S::ROWS * S::HEAD_DIM / 2 * 4 + 2 * S::ROWS * 8 : 0;
    static_assert(2 * sizeof(Split) <= SPLIT_BYTES, "a share has two split units at most");
    static_assert(S::THREADS * 24 <= SCORE_BYTES, "merging uses the memory of scores");

    T* tiles;         // [STAGES, KEYS, PITCH]
    T* queries;       // [ROWS, PITCH], unless they are in registers
    float* scores;    // [DEPTHS, ROWS, KEYS]
    T* weights;       // [ROWS, WEIGHT_PITCH]
    float* rescales;  // [ROWS]: factors of earlier sums
    float* inverses;  // [ROWS]: of the totals of a whole unit
    Split* splits;    // [2]
    float4* others;   // [ROWS * HEAD_DIM / 8], from the other block of a pair
    float2* states;   // [2, ROWS]: maxima and totals, of the own rows and of the other block's

    __device__ __forceinline__ explicit LatentMemory(unsigned char* memory) {
        const auto take = [&](int bytes) {
            unsigned char* const taken = memory;
            memory += bytes;
            return taken;
        };
        tiles = reinterpret_cast<T*>(take(TILE_BYTES));
        queries = reinterpret_cast<T*>(take(QUERY_BYTES));
        scores = reinterpret_cast<float*>(take(SCORE_BYTES));
        weights = reinterpret_cast<T*>(take(WEIGHT_BYTES));
        rescales = reinterpret_cast<float*>(take(S::ROWS * 4));
        inverses = reinterpret_cast<float*>(take(S::ROWS * 4));
        splits = reinterpret_cast<Split*>(take(SPLIT_BYTES));
        others = reinterpret_cast<float4*>(take(EXCHANGE_BYTES));
        states = reinterpret_cast<float2*>(others + S::ROWS * S::HEAD_DIM / 8);
    }
};

}  // namespace attention
