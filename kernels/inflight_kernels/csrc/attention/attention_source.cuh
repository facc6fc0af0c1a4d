// Sources of the queries and of this step's keys and values, for `attend` and `rope_attend`.
#pragma once

#include "attention/attention_tile.cuh"

namespace attention {

// q and the cache as written by `rope_write_kv`.
template <class S>
struct InPlace {
    using T = typename S::Element;
    static constexpr bool ROTATES = false;
    static constexpr bool REHEARSES = false;

    __device__ __forceinline__ void prepare(const Arguments<T>&, const Unit&, int, int) {}
    __device__ __forceinline__ void load(const Arguments<T>&, const Unit&) {}
    __device__ __forceinline__ const T* key_row(const Arguments<T>&, const Unit&) const {
        return nullptr;
    }
    __device__ __forceinline__ void rotate(const Unit&, HeadRow<S> (&)[2]) const {}
    __device__ __forceinline__ bool is_new(const Unit&, int) const { return false; }
    __device__ __forceinline__ void place(const Arguments<T>&, const Unit&,
                                          const HeadRow<S> (&)[2], T*, T*) const {}
};

// Additional arguments of `rope_attend`; see rope.cu.
template <typename T>
struct Projection {
    T* k_cache;
    T* v_cache;
    const long long* slots;
    const long long* positions;
    const float* cos;
    const float* sin;
    const float* q_weight;
    const float* k_weight;
    float eps;
};

// Whether a tile has the key of a chunk's only token; and whether this warp copies that place, in
// one of the tiles `begin` to `end`.
template <class S>
__device__ __forceinline__ bool has_token(const Unit& unit, int tile) {
    return tile == (unit.item.kv_len - unit.item.query_len) / S::KEYS;
}
template <class S>
__device__ __forceinline__ bool copies_token(const Unit& unit, int begin, int end) {
    const int history = unit.item.kv_len - unit.item.query_len, tile = history / S::KEYS;
    return unit.item.kv_len > 0 && tile >= begin && tile < end &&
           history % S::KEYS / S::COPY_KEYS == threadIdx.x / 32;
}

// Rotates two values of the first half of a head, a, and those across from them, b.
template <typename T>
__device__ __forceinline__ void rotate_pairs(const float2& a, const float2& b, const float2& cos,
                                             const float2& sin, unsigned& low, unsigned& high) {
    low = ptx::pack<T>(a.x * cos.x - b.x * sin.x, a.y * cos.y - b.y * sin.y);
    high = ptx::pack<T>(b.x * cos.x + a.x * sin.x, b.y * cos.y + a.y * sin.y);
}

// The rows of a qkv projection, one token per chunk: q is normed and rotated while it is loaded
// into registers. The token's key is processed as an additional row of q, and then written to its
// tile and to the cache.
template <class S, bool NORM, bool QUANTIZED = S::QUANTIZED>
struct Rotated {
    using T = typename S::Element;
    static constexpr bool ROTATES = true;
    static constexpr bool REHEARSES = true;
    static constexpr int HALF_STEPS = S::HEAD_DIM / 32;
    static_assert(S::PRIVATE && S::QUERIES_IN_REGISTERS, "a warp puts a key where it reads it");

    const Projection<T>& projection;
    bool has_key;  // this warp has the token's key in one of its tiles
    long long slot;
    float2 cos[HALF_STEPS][2], sin[HALF_STEPS][2];
    float2 weights[2][2 * HALF_STEPS][2];  // of `rows`, in the order of their words
    uint4 value;

    __device__ __forceinline__ explicit Rotated(const Projection<T>& all) : projection(all) {}

    // Loads everything that the projection does not write.
    __device__ __forceinline__ void prepare(const Arguments<T>& args, const Unit& unit, int begin,
                                            int end) {
        has_key = copies_token<S>(unit, begin, end);
        const int token = unit.item.query_start;
        slot = load_l2(projection.slots + token);
        const long long place =
            load_l2(projection.positions + token) * S::HEAD_DIM + threadIdx.x % 4 * 2;
        load_angles(reinterpret_cast<const float2*>(projection.cos + place),
                    reinterpret_cast<const float2*>(projection.sin + place),
                    typename IndicesUpTo<HALF_STEPS>::type());
        if constexpr (NORM) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* const weight = half * 8 + threadIdx.x % 32 / 4 < unit.num_rows
                                                ? projection.q_weight
                                                : projection.k_weight;
                load_weights(weights[half],
                             reinterpret_cast<const float2*>(weight + threadIdx.x % 4 * 2),
                             typename IndicesUpTo<2 * HALF_STEPS>::type());
            }
        }
    }

    // In a rehearsal nothing is written to the cache.
    __device__ __forceinline__ void rehearses(bool yes) {
        if (yes) slot = -1;
    }

    __device__ __forceinline__ const T* key_row(const Arguments<T>& args, const Unit& unit) const {
        return !has_key ? nullptr
                        : args.q + unit.item.query_start * args.q_stride +
                              (args.num_heads + unit.head) * S::HEAD_DIM;
    }

    __device__ __forceinline__ void load(const Arguments<T>& args, const Unit& unit) {
        const int lane = threadIdx.x % 32;
        if (has_key && lane < S::CHUNKS)
            value = load_l2(reinterpret_cast<const uint4*>(key_row(args, unit) +
                                                           args.num_kv_heads * S::HEAD_DIM) +
                            lane);
    }

    __device__ __forceinline__ void rotate(const Unit& unit, HeadRow<S> (&rows)[2]) const {
        rotate(rows[0], weights[0]);
        if (unit.num_rows >= 8) rotate(rows[1], weights[1]);
    }

    __device__ __forceinline__ bool is_new(const Unit& unit, int tile) const {
        return has_token<S>(unit, tile);
    }

    // Writes it to the tile, where only this warp reads it, and to the cache.
    __device__ __forceinline__ void place(const Arguments<T>& args, const Unit& unit,
                                          const HeadRow<S> (&rows)[2], T* keys,
                                          T* values) const {
        if (!has_key) return;
        const int lane = threadIdx.x % 32;
        const int row = (unit.item.kv_len - 1) % S::KEYS * S::PITCH;
        if (lane / 4 == unit.num_rows % 8) {
            unsigned* const words = reinterpret_cast<unsigned*>(keys + row) + lane % 4;
            const bool low = unit.num_rows < 8;  // the key is among the first 8 rows
#pragma unroll
            for (int step = 0; step < HeadRow<S>::STEPS; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const unsigned first = rows[0].words[step][half];
                    const unsigned second = rows[1].words[step][half];
                    words[step * 8 + half * 4] = low ? first : second;
                }
        }
        if (lane < S::CHUNKS) reinterpret_cast<uint4*>(values + row)[lane] = value;
        __syncwarp();
        if (slot < 0 || lane >= S::CHUNKS) return;
        const int offset = static_cast<int>(slot) & ((1 << args.block_shift) - 1);
        const long long to = (static_cast<int>(slot) >> args.block_shift) * args.block_stride +
                             (offset * args.num_kv_heads + unit.head) * S::HEAD_DIM;
        reinterpret_cast<uint4*>(projection.k_cache + to)[lane] =
            reinterpret_cast<const uint4*>(keys + row)[lane];
        reinterpret_cast<uint4*>(projection.v_cache + to)[lane] = value;
    }

   private:
    template <int... STEP>
    __device__ __forceinline__ void load_angles(const float2* cosines, const float2* sines,
                                                Indices<STEP...>) {
        constexpr int SECOND = S::HEAD_DIM / 2 * 4;
        ((cos[STEP][0] = load_l2<STEP * 64>(cosines)), ...);
        ((cos[STEP][1] = load_l2<STEP * 64 + 32>(cosines)), ...);
        ((sin[STEP][0] = load_l2<SECOND + STEP * 64>(sines)), ...);
        ((sin[STEP][1] = load_l2<SECOND + STEP * 64 + 32>(sines)), ...);
    }

    template <int... STEP>
    __device__ __forceinline__ static void load_weights(float2 (&into)[2 * HALF_STEPS][2],
                                                        const float2* first, Indices<STEP...>) {
        ((into[STEP][0] = load_l2<STEP * 64>(first)), ...);
        ((into[STEP][1] = load_l2<STEP * 64 + 32>(first)), ...);
    }

    __device__ __forceinline__ void rotate(HeadRow<S>& row,
                                           const float2 (&weight)[2 * HALF_STEPS][2]) const {
        float scale = 1.0f;
        if (NORM) {
            float squares = 0.0f;
#pragma unroll
            for (int step = 0; step < HeadRow<S>::STEPS; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 x = ptx::unpack<T>(row.words[step][half]);
                    squares += x.x * x.x + x.y * x.y;
                }
            scale = rsqrtf(sum_of_quad(squares) / S::HEAD_DIM + projection.eps);
        }
#pragma unroll
        for (int step = 0; step < HALF_STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned& low = row.words[step][half];
                unsigned& high = row.words[step + HALF_STEPS][half];
                float2 a = ptx::unpack<T>(low), b = ptx::unpack<T>(high);
                if (NORM) {
                    const float2 w = weight[step][half], v = weight[step + HALF_STEPS][half];
                    a = make_float2(a.x * (scale * w.x), a.y * (scale * w.y));
                    b = make_float2(b.x * (scale * v.x), b.y * (scale * v.y));
                }
                rotate_pairs<T>(a, b, cos[step][half], sin[step][half], low, high);
            }
    }
};

// The same for a cache of 8 bits, with the bytes and scales that rope.cu writes. Keys are quantised
// before they are rounded to T, and by all lanes instead of the four that rotate one: they pass
// through shared memory, where cosines, sines and weights are as well. In registers, these would be
// kept throughout the main loop. Those of Int8 are spread, as its queries are (kv_quantization.cuh).
template <class S, bool NORM>
struct Rotated<S, NORM, true> {
    using T = typename S::Element;
    static constexpr bool ROTATES = true;
    static constexpr bool REHEARSES = true;
    static constexpr bool SPREADS = SAME<typename S::Cached, Int8>;
    static constexpr int HALF = S::HEAD_DIM / 2;
    static constexpr int HALF_STEPS = S::HEAD_DIM / 32;
    // A warp's floats in the memory of the sums, which is free until a unit is finished.
    static constexpr int COS = 0, SIN = HALF, Q_WEIGHT = 2 * HALF, K_WEIGHT = 4 * HALF,
                         KEY = 6 * HALF, FLOATS = 8 * HALF;
    static_assert(S::PRIVATE && S::QUERIES_IN_REGISTERS, "a warp puts a key where it reads it");
    static_assert(S::SUMS_APART && S::WARPS * FLOATS * 4 <= S::SUMS_BYTES, "no room for floats");

    const Projection<T>& projection;
    bool has_key;  // this warp has the token's key in one of its tiles
    long long slot;
    uint2 value;  // four columns of the token's value; zeros in lanes past the head

    __device__ __forceinline__ explicit Rotated(const Projection<T>& all) : projection(all) {}

    // Copies everything that the projection does not write; awaited together with the first tile.
    __device__ __forceinline__ void prepare(const Arguments<T>&, const Unit& unit, int begin,
                                            int end) {
        has_key = copies_token<S>(unit, begin, end);
        const int token = unit.item.query_start;
        slot = load_l2(projection.slots + token);
        const long long place = load_l2(projection.positions + token) * S::HEAD_DIM;
        copy<HALF>(COS, projection.cos + place);
        copy<HALF>(SIN, projection.sin + place + HALF);
        if constexpr (NORM) {
            copy<S::HEAD_DIM>(Q_WEIGHT, projection.q_weight);
            copy<S::HEAD_DIM>(K_WEIGHT, projection.k_weight);
        }
    }

    // In a rehearsal nothing is written to the cache.
    __device__ __forceinline__ void rehearses(bool yes) {
        if (yes) slot = -1;
    }

    __device__ __forceinline__ const T* key_row(const Arguments<T>& args, const Unit& unit) const {
        return !has_key ? nullptr
                        : args.q + unit.item.query_start * args.q_stride +
                              (args.num_heads + unit.head) * S::HEAD_DIM;
    }

    __device__ __forceinline__ void load(const Arguments<T>& args, const Unit& unit) {
        const int lane = threadIdx.x % 32;
        value = make_uint2(0, 0);
        if (has_key && lane < ByteRow<S>::LANES)
            value = load_l2(reinterpret_cast<const uint2*>(key_row(args, unit) +
                                                           args.num_kv_heads * S::HEAD_DIM) +
                            lane);
    }

    __device__ __forceinline__ void rotate(const Unit& unit, HeadRow<S> (&rows)[2]) const {
        rotate(unit, rows[0], threadIdx.x % 32 / 4);
        if (unit.num_rows >= 8) rotate(unit, rows[1], threadIdx.x % 32 / 4 + 8);
    }

    __device__ __forceinline__ bool is_new(const Unit& unit, int tile) const {
        return has_token<S>(unit, tile);
    }

    // Quantises the key and the value into the tile, where only this warp reads them, and the
    // cache.
    __device__ __forceinline__ void place(const Arguments<T>& args, const Unit& unit,
                                          const HeadRow<S> (&)[2], T* keys, T* values) const {
        if (!has_key) return;
        const int lane = threadIdx.x % 32;
        const int row = (unit.item.kv_len - 1) % S::KEYS;
        const int offset = static_cast<int>(slot) & ((1 << args.block_shift) - 1);
        const long long block = (static_cast<int>(slot) >> args.block_shift) * args.block_stride;
        const long long to = block + (offset * args.num_kv_heads + unit.head) * S::HEAD_DIM;
        const long long scale_to =
            block + scales_offset(1 << args.block_shift, args.num_kv_heads, S::HEAD_DIM) +
            ((unit.head << args.block_shift) + offset) * 2;
        __syncwarp();  // the key is written
        float four[4] = {};
        if (lane < ByteRow<S>::LANES) load_floats(own() + KEY + lane * 4, four);
        // Not unrolled: instruction fetches are noticeable.
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            T* const tile = i == 0 ? keys : values;
            if (SPREADS && i == 0) spread(four);
            const ByteRow<S> bytes(four, i == 0);
            bytes.store(reinterpret_cast<unsigned char*>(tile) + row * byte_pitch(S::HEAD_DIM),
                        scales_of<S>(tile) + row);
            if (slot >= 0) {
                T* const cache = i == 0 ? projection.k_cache : projection.v_cache;
                unsigned char* const begin = reinterpret_cast<unsigned char*>(cache);
                bytes.store(begin + to, reinterpret_cast<__half*>(begin + scale_to));
            }
            Word<T>::unpack(value.x, four);
            Word<T>::unpack(value.y, four + 2);
        }
        __syncwarp();
    }

   private:
    __device__ __forceinline__ static float* own() {
        extern __shared__ __align__(16) unsigned char memory[];
        return reinterpret_cast<float*>(memory + S::QUERY_BYTES + S::STAGES * S::STAGE_BYTES) +
               threadIdx.x / 32 * FLOATS;
    }

    template <int COUNT>
    __device__ __forceinline__ static void copy(int place, const float* from) {
        const int first = threadIdx.x % 32 * 4;
        ptx::copy_async_if(first < COUNT, ptx::shared_address(own() + place + first), from + first,
                           true);
    }

    // The lane's columns of 16, 4 * (lane % 4) and the next ones.
    __device__ __forceinline__ static void unpack_four(const unsigned (&words)[2],
                                                       float (&four)[4]) {
        const float2 first = ptx::unpack<T>(words[0]), second = ptx::unpack<T>(words[1]);
        four[0] = first.x;
        four[1] = first.y;
        four[2] = second.x;
        four[3] = second.y;
    }

    __device__ __forceinline__ static void pack_four(const float (&four)[4],
                                                     unsigned (&words)[2]) {
        words[0] = ptx::pack<T>(four[0], four[1]);
        words[1] = ptx::pack<T>(four[2], four[3]);
    }

    // Norms and rotates a row of the unit, or the key behind them.
    __device__ __forceinline__ void rotate(const Unit& unit, HeadRow<S>& row, int index) const {
        float* const floats = own() + threadIdx.x % 4 * 4;
        const float* const weight = floats + (index < unit.num_rows ? Q_WEIGHT : K_WEIGHT);
        const bool is_key = has_key && index == unit.num_rows;
        float scale = 1.0f;
        if (NORM) scale = rsqrtf(sum_of_squares(row) / S::HEAD_DIM + projection.eps);
        float lows[HALF_STEPS][4], highs[HALF_STEPS][4];
#pragma unroll
        for (int step = 0; step < HALF_STEPS; ++step) {
            float c[4], s[4];
            float(&a)[4] = lows[step];
            float(&b)[4] = highs[step];
            unpack_four(row.words[step], a);
            unpack_four(row.words[step + HALF_STEPS], b);
            load_floats(floats + COS + step * 16, c);
            load_floats(floats + SIN + step * 16, s);
            if (NORM) {
                float w[4], v[4];
                load_floats(weight + step * 16, w);
                load_floats(weight + HALF + step * 16, v);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    a[i] *= scale * w[i];
                    b[i] *= scale * v[i];
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float turned = difference_of_products(a[i], c[i], b[i], s[i]);
                b[i] = sum_of_products(b[i], c[i], a[i], s[i]);
                a[i] = turned;
            }
            if (!is_key) continue;
            store_vector(floats + KEY + step * 16, pack<float>(a));
            store_vector(floats + KEY + HALF + step * 16, pack<float>(b));
        }
        if constexpr (SPREADS) spread(lows, highs);
#pragma unroll
        for (int step = 0; step < HALF_STEPS; ++step) {
            pack_four(lows[step], row.words[step]);
            pack_four(highs[step], row.words[step + HALF_STEPS]);
        }
    }

    // Spreads a row of q, of which four lanes have four of each 16 columns.
    __device__ __forceinline__ static void spread(float (&lows)[HALF_STEPS][4],
                                                  float (&highs)[HALF_STEPS][4]) {
#pragma unroll
        for (int step = 0; step < HALF_STEPS; ++step) {
            spread_within(lows[step]);
            spread_within(highs[step]);
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    lows[step][i] = butterfly_of_lanes(lows[step][i], distance);
                    highs[step][i] = butterfly_of_lanes(highs[step][i], distance);
                }
        }
#pragma unroll
        for (int distance = 1; HALF_STEPS % (2 * distance) == 0; distance *= 2)
#pragma unroll
            for (int step = 0; step < HALF_STEPS; ++step)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if ((step & distance) == 0) {
                        butterfly(lows[step][i], lows[step + distance][i]);
                        butterfly(highs[step][i], highs[step + distance][i]);
                    }
#pragma unroll
        for (int step = 0; step < HALF_STEPS; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                butterfly(lows[step][i], highs[step][i]);
                lows[step][i] *= spread_factor_of_q(S::HEAD_DIM);
                highs[step][i] *= spread_factor_of_q(S::HEAD_DIM);
            }
    }

    // Spreads a key, of which each of the first lanes has four columns.
    __device__ __forceinline__ static void spread(float (&four)[4]) {
        constexpr int HALF_LANES = HALF / 4, BLOCK_LANES = (HALF & -HALF) / 4;
        const int lane = threadIdx.x % 32;
        const bool upper = lane >= HALF_LANES;
        spread_within(four);
#pragma unroll
        for (int distance = 1; distance < BLOCK_LANES; distance *= 2)
#pragma unroll
            for (int i = 0; i < 4; ++i) four[i] = butterfly_of_lanes(four[i], distance);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float across =
                __shfl_sync(FULL_WARP, four[i], upper ? lane - HALF_LANES : lane + HALF_LANES);
            four[i] = fmaf(upper ? -1.0f : 1.0f, four[i], across) * spread_factor_of_k(S::HEAD_DIM);
        }
    }

    __device__ __forceinline__ static void spread_within(float (&four)[4]) {
        butterfly(four[0], four[1]);
        butterfly(four[2], four[3]);
        butterfly(four[0], four[2]);
        butterfly(four[1], four[3]);
    }

    // In the order of rope.cu: there, a lane adds the squares of 8 columns of the first half and of
    // those across from them, and the lanes are then reduced. Here, two lanes have these columns;
    // the second one continues the sums of the first.
    __device__ __forceinline__ static float sum_of_squares(const HeadRow<S>& row) {
        float sums[HALF_STEPS];
#pragma unroll
        for (int turn = 0; turn < 2; ++turn)
#pragma unroll
            for (int step = 0; step < HALF_STEPS; ++step) {
                float a[4], b[4];
                unpack_four(row.words[step], a);
                unpack_four(row.words[step + HALF_STEPS], b);
                float sum = turn == 0 ? 0.0f : __shfl_xor_sync(FULL_WARP, sums[step], 1);
#pragma unroll
                for (int i = 0; i < 4; ++i) sum += sum_of_products(a[i], a[i], b[i], b[i]);
                sums[step] = sum;
            }
#pragma unroll
        for (int distance = 2; distance > 0; distance /= 2)
#pragma unroll
            for (int step = 0; step < distance; ++step)
                if (step + distance < HALF_STEPS) sums[step] += sums[step + distance];
        return __shfl_sync(FULL_WARP, sums[0], 1, 4) + __shfl_sync(FULL_WARP, sums[0], 3, 4);
    }
};

constexpr int MAX_ROPE_TOKENS = 16;

// The same for one chunk of up to MAX_ROPE_TOKENS tokens without norms, and a cache of T. Each row
// of q has the angles of its token. A warp rotates the keys among those that it copies, several at
// a time: they are in one of its tiles, as the places of its keys in the next one are farther away.
template <class S>
struct RotatedChunk {
    using T = typename S::Element;
    static constexpr bool ROTATES = true;
    static constexpr bool REHEARSES = false;
    static constexpr int HALF = S::HEAD_DIM / 2, HALF_STEPS = S::HEAD_DIM / 32;
    static constexpr int LANES = HALF / 8;  // of a key: each has a vector of either half
    static constexpr int AT_ONCE = 32 / LANES;
    static_assert(S::PRIVATE && S::QUERIES_IN_REGISTERS, "a warp puts keys where it reads them");
    static_assert(!S::QUANTIZED && 32 % LANES == 0, "lanes share keys evenly");
    static_assert(S::KEYS - S::COPY_KEYS >= MAX_ROPE_TOKENS, "keys may be in two tiles of a warp");

    // A lane's part of a key and its value.
    struct Key {
        float cos[8], sin[8];
        uint4 key[2], value[2];
    };

    const Projection<T>& projection;
    int first_key, end_key;  // those that this warp has
    float2 cos[2][HALF_STEPS][2], sin[2][HALF_STEPS][2];
    Key first;

    __device__ __forceinline__ explicit RotatedChunk(const Projection<T>& all) : projection(all) {}

    __device__ __forceinline__ static int history_of(const Unit& unit) {
        return unit.item.kv_len - unit.item.query_len;
    }
    __device__ __forceinline__ static int column() { return threadIdx.x % LANES * 8; }

    // Loads everything that the projection does not write.
    __device__ __forceinline__ void prepare(const Arguments<T>& args, const Unit& unit, int begin,
                                            int end) {
        const int history = history_of(unit), kv_len = unit.item.kv_len;
        const int place = threadIdx.x / 32 * S::COPY_KEYS;
        first_key = end_key = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int tile = i == 0 ? history / S::KEYS : (kv_len - 1) / S::KEYS;
            const int from = max(history, tile * S::KEYS + place);
            const int to = min(kv_len, tile * S::KEYS + place + S::COPY_KEYS);
            if (tile < begin || tile >= end || from >= to) continue;
            first_key = from;
            end_key = to;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row =
                min(half * 8 + static_cast<int>(threadIdx.x) % 32 / 4, unit.num_rows - 1);
            const int token = unit.item.query_start + args.token_of(unit.item.first_row + row);
            const long long at =
                load_l2(projection.positions + token) * S::HEAD_DIM + threadIdx.x % 4 * 2;
#pragma unroll
            for (int step = 0; step < HALF_STEPS; ++step)
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    const long long where = at + step * 16 + part * 8;
                    cos[half][step][part] =
                        load_l2(reinterpret_cast<const float2*>(projection.cos + where));
                    sin[half][step][part] =
                        load_l2(reinterpret_cast<const float2*>(projection.sin + where + HALF));
                }
        }
        load_angles(first, unit, first_key + threadIdx.x % 32 / LANES);
    }

    __device__ __forceinline__ const T* key_row(const Arguments<T>&, const Unit&) const {
        return nullptr;
    }

    __device__ __forceinline__ void load(const Arguments<T>& args, const Unit& unit) {
        load_key(first, args, unit, first_key + threadIdx.x % 32 / LANES);
    }

    __device__ __forceinline__ void rotate(const Unit&, HeadRow<S> (&rows)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int step = 0; step < HALF_STEPS; ++step)
#pragma unroll
                for (int part = 0; part < 2; ++part)
                    rotate_words(rows[half].words[step][part],
                                 rows[half].words[step + HALF_STEPS][part], cos[half][step][part],
                                 sin[half][step][part]);
    }

    __device__ __forceinline__ bool is_new(const Unit&, int tile) const {
        return first_key < end_key && first_key / S::KEYS == tile;
    }

    // Writes keys and values to the tile, where only this warp reads them, and to the cache.
    __device__ __forceinline__ void place(const Arguments<T>& args, const Unit& unit,
                                          const HeadRow<S> (&)[2], T* keys, T* values) const {
        Key one = first;
#pragma unroll 1
        for (int base = first_key; base < end_key; base += AT_ONCE) {
            const int key = base + threadIdx.x % 32 / LANES;
            if (base > first_key) {
                load_angles(one, unit, key);
                load_key(one, args, unit, key);
            }
            if (key >= end_key) continue;
            unsigned* const low = reinterpret_cast<unsigned*>(&one.key[0]);
            unsigned* const high = reinterpret_cast<unsigned*>(&one.key[1]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                rotate_words(low[i], high[i], make_float2(one.cos[2 * i], one.cos[2 * i + 1]),
                             make_float2(one.sin[2 * i], one.sin[2 * i + 1]));
            const long long slot = load_l2(projection.slots + token_of(unit, key));
            const int offset = static_cast<int>(slot) & ((1 << args.block_shift) - 1);
            const long long to = (static_cast<int>(slot) >> args.block_shift) * args.block_stride +
                                 (offset * args.num_kv_heads + unit.head) * S::HEAD_DIM + column();
            const int at = key % S::KEYS * S::PITCH + column();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                store_vector(keys + at + half * HALF, one.key[half]);
                store_vector(values + at + half * HALF, one.value[half]);
                if (slot < 0) continue;
                store_vector(projection.k_cache + to + half * HALF, one.key[half]);
                store_vector(projection.v_cache + to + half * HALF, one.value[half]);
            }
        }
        __syncwarp();
    }

   private:
    // Index of a key's token in the step.
    __device__ __forceinline__ static int token_of(const Unit& unit, int key) {
        return unit.item.query_start + key - history_of(unit);
    }

    __device__ __forceinline__ void load_angles(Key& to, const Unit& unit, int key) const {
        if (key >= end_key) return;
        const long long at =
            load_l2(projection.positions + token_of(unit, key)) * S::HEAD_DIM + column();
        load_floats(projection.cos + at, to.cos);
        load_floats(projection.sin + at + HALF, to.sin);
    }

    __device__ __forceinline__ void load_key(Key& to, const Arguments<T>& args, const Unit& unit,
                                             int key) const {
        if (key >= end_key) return;
        const T* const row = args.q + token_of(unit, key) * args.q_stride +
                             (args.num_heads + unit.head) * S::HEAD_DIM + column();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            to.key[half] = load_l2(reinterpret_cast<const uint4*>(row + half * HALF));
            to.value[half] = load_l2(reinterpret_cast<const uint4*>(
                row + args.num_kv_heads * S::HEAD_DIM + half * HALF));
        }
    }

    __device__ __forceinline__ static void rotate_words(unsigned& low, unsigned& high,
                                                        const float2& cos, const float2& sin) {
        rotate_pairs<T>(ptx::unpack<T>(low), ptx::unpack<T>(high), cos, sin, low, high);
    }
};

}  // namespace attention
