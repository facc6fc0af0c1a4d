// Sources of the queries and of this step's keys and values, for `attend` and `rope_attend`.
#pragma once

#include "attention/attention_tile.cuh"

namespace attention {

// q and the cache as written by `rope_write_kv`.
template <class S>
struct InPlace {
    using T = typename S::Element;
    static constexpr bool ROTATES = false;

    __device__ __forceinline__ void prepare(const Arguments<T>&, const Unit&, bool) {}
    __device__ __forceinline__ void load(const Arguments<T>&, const Unit&) {}
    __device__ __forceinline__ const T* key_row(const Arguments<T>&, const Unit&) const {
        return nullptr;
    }
    __device__ __forceinline__ void rotate(const Unit&, HeadRow<S> (&)[2]) const {}
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

// The rows of a qkv projection, one token per chunk: q is normed and rotated while it is loaded
// into registers. The token's key is processed as an additional row of q, and then written to its
// tile and to the cache.
template <class S, bool NORM>
struct Rotated {
    using T = typename S::Element;
    static constexpr bool ROTATES = true;
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
    __device__ __forceinline__ void prepare(const Arguments<T>& args, const Unit& unit,
                                            bool has_new) {
        has_key = has_new;
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
                const float2 c = cos[step][half], s = sin[step][half];
                low = ptx::pack<T>(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
                high = ptx::pack<T>(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
            }
    }
};

}  // namespace attention
