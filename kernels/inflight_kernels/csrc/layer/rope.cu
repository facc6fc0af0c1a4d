// Fused per-head norm, RoPE and KV cache write, between the qkv projection and attention.
#include "common.cuh"
#include "kv_quantization.cuh"

__device__ constexpr int power_of_two_from(int n) {
    return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2);
}

constexpr int BLOCKS_AT_ONCE = 1024;  // about as many as a GPU runs; others start late

// The largest magnitude in two vectors of each of WIDTH lanes; NaN if there is one, as among bit
// patterns it is the largest. All lanes of the warp must call it.
template <int WIDTH, int N>
__device__ float largest_of(const float (&a)[N], const float (&b)[N]) {
    unsigned largest = 0;
#pragma unroll
    for (int j = 0; j < N; j++) {
        largest = max(largest, __float_as_uint(a[j]) & 0x7fffffffu);
        largest = max(largest, __float_as_uint(b[j]) & 0x7fffffffu);
    }
#pragma unroll
    for (int distance = WIDTH / 2; distance > 0; distance /= 2)
        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
    return __uint_as_float(largest);
}

// The index of the scale of a key of e4m3 with this largest magnitude, likewise.
template <int WIDTH, int N>
__device__ int best_scale(const float (&a)[N], const float (&b)[N], float largest) {
    float values[N / 2];
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        values[j / 2] = KeyScales::largest_of(a + j);
        values[j / 2 + 1] = KeyScales::largest_of(b + j);
    }
    return KeyScales::best<WIDTH>(values, largest);
}

// Spreads a head, of which each of LANES lanes has N columns of the first half and those across
// from them (see kv_quantization.cuh). All lanes of the warp must call it.
template <int LANES, int N>
__device__ void spread(float (&a)[N], float (&b)[N]) {
#pragma unroll
    for (int distance = 1; distance < N; distance *= 2)
#pragma unroll
        for (int j = 0; j < N; j++)
            if ((j & distance) == 0) {
                butterfly(a[j], a[j + distance]);
                butterfly(b[j], b[j + distance]);
            }
#pragma unroll
    for (int distance = 1; distance < (LANES & -LANES); distance *= 2)
#pragma unroll
        for (int j = 0; j < N; j++) {
            a[j] = butterfly_of_lanes(a[j], distance);
            b[j] = butterfly_of_lanes(b[j], distance);
        }
#pragma unroll
    for (int j = 0; j < N; j++) butterfly(a[j], b[j]);
}

// Writes values, multiplied by the inverse of their scale, as bytes; zeros if that is 0.
template <typename C>
__device__ void store_bytes(C* target, const float (&values)[8], float inverse) {
    *reinterpret_cast<uint2*>(target) =
        make_uint2(encode_word<C>(values, inverse), encode_word<C>(values + 4, inverse));
}

// One block per token. A row of qkv is num_heads heads of q, then num_kv_heads of k and of v.
//
// GROUP lanes of a warp process a head. Each has a vector of the first half and the corresponding
// one of the second, so a rotation stays in a thread; cosines and sines are loaded once for all
// heads of a thread. cos and sin are rows of D per position; the second half of `sin` has the
// positive sign. Negative slots are not written. `history_ready`: slots and positions are
// (common.cuh), and the next kernel has much to do before its wait.
//
// C is the type of the cache: T, or a byte of kv_quantization.cuh, whose strides are in bytes. The
// lanes of a head then share their largest magnitude, and the first one writes the scale. For Int8,
// q and k are spread. For Fp8, the compiler would use so many registers to choose a key's scale that
// prompts take a quarter longer, hence the second launch bound (0 is none).
template <typename T, typename C, int D, bool NORM>
__global__ void __launch_bounds__(512, SAME<C, Fp8> ? 2 : 0)
    rope_write_kv(const T* qkv, long long qkv_stride, T* q_out, long long q_stride, C* k_cache,
                  C* v_cache, long long block_stride, long long slot_stride, long long head_stride,
                  int block_size, const long long* slots, const long long* positions,
                  const float* cos, const float* sin, const float* q_weight, const float* k_weight,
                  float eps, int num_heads, int num_kv_heads, bool history_ready) {
    constexpr int N = VECTOR<T>;
    constexpr int HALF = D / 2;
    constexpr int LANES = HALF / N;
    constexpr int GROUP = power_of_two_from(LANES);
    static_assert(HALF % N == 0, "a half of a head is whole vectors of 16 bytes");
    static_assert(GROUP <= 32, "a head is the work of one warp at most");

    const int lane = threadIdx.x % GROUP;
    const int first = threadIdx.x / GROUP;
    const int heads_at_once = blockDim.x / GROUP;
    const int all_heads = num_heads + 2 * num_kv_heads;
    const int column = lane * N;
    // The last tokens are first: they are still in the L2 cache, if the product has written them
    // last.
    const long long token = gridDim.x - 1 - blockIdx.x;

    if (!history_ready) pdl_wait();
    pdl_launch_dependents();
    const long long slot = load_l2(slots + token), position = load_l2(positions + token);
    const T* row = qkv + token * qkv_stride + column;
    // The vectors of the next iteration are loaded during this one.
    uint4 low = {}, high = {};
    const auto load = [&](int head) {
        if (lane >= LANES || head >= all_heads) return;
        low = load_vector(row + head * D);
        high = load_vector(row + head * D + HALF);
    };
    // With Int8 the compiler would use so many more registers for the two things that depend on it
    // that fewer blocks fit.
    constexpr bool ANTICIPATES = !SAME<C, Int8>;
    // Blocks that start late have no preceding kernel to wait for, and load before the angles,
    // which wait for positions.
    const bool starts_late = ANTICIPATES && gridDim.x >= BLOCKS_AT_ONCE;
    if (starts_late) {
        if (history_ready) pdl_wait();
        load(first);
    }
    float c[N], s[N];
    if (lane < LANES) {
        load_floats(cos + position * D + column, c);
        load_floats(sin + position * D + HALF + column, s);
    }
    const int block = slot < 0 ? -1 : static_cast<int>(slot) / block_size;
    const int offset = static_cast<int>(slot) - block * block_size;  // in the block
    // Which cache a head of k or v is written to, and the address of its columns there.
    const int first_value = num_heads + num_kv_heads;
    const auto cache_of = [&](int head) { return head < first_value ? k_cache : v_cache; };
    const auto kv_head_of = [&](int head) {
        return head - (head < first_value ? num_heads : first_value);
    };
    const auto place_of = [&](int head) {
        return cache_of(head) + block * block_stride + offset * slot_stride +
               kv_head_of(head) * head_stride + column;
    };
    // While the preceding kernel ends, the page of the cache that a head is written to is looked
    // up: otherwise all would be computed by then, and the next kernel wait for it.
    if (ANTICIPATES && history_ready && !starts_late && block >= 0 && lane < LANES &&
        first >= num_heads && first < all_heads) {
        prefetch_l2(place_of(first));
        prefetch_l2(place_of(first) + HALF);
    }
    // Only bytes are much work.
    const bool rehearsed = !SAME<T, C> && history_ready && rehearses();
    if (!starts_late && !rehearsed) {
        if (history_ready) pdl_wait();
        load(first);
    }

    // By all lanes of a warp: the reduction of NORM needs all of them. No head is `mine` when it is
    // rehearsed, with a negative one.
    const auto process = [&](int head, bool mine, float (&a)[N], float (&b)[N]) {
        const bool rotated = head < first_value;
        if (NORM) {
            float squares = 0.0f;
#pragma unroll
            for (int j = 0; j < N; j++)
                squares += SAME<T, C> ? a[j] * a[j] + b[j] * b[j]
                                      : sum_of_products(a[j], a[j], b[j], b[j]);
            const float scale = rsqrtf(warp_sum<GROUP>(squares) / D + eps);
            if (mine && rotated) {
                const float* weight = (head < num_heads ? q_weight : k_weight) + column;
                float w[N];
                load_floats(weight, w);
#pragma unroll
                for (int j = 0; j < N; j++) a[j] *= scale * w[j];
                load_floats(weight + HALF, w);
#pragma unroll
                for (int j = 0; j < N; j++) b[j] *= scale * w[j];
            }
        }
        if (SAME<T, C> && !mine) return;
        if (rotated && (SAME<T, C> || mine)) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float turned = SAME<T, C>
                                         ? a[j] * c[j] - b[j] * s[j]
                                         : difference_of_products(a[j], c[j], b[j], s[j]);
                b[j] = SAME<T, C> ? b[j] * c[j] + a[j] * s[j]
                                  : sum_of_products(b[j], c[j], a[j], s[j]);
                a[j] = turned;
            }
        }
        if constexpr (SAME<T, C>) {
            if (head >= num_heads && block < 0) return;
            T* const target =
                head < num_heads ? q_out + token * q_stride + head * D + column : place_of(head);
            store_vector(target, pack<T>(a));
            store_vector(target + HALF, pack<T>(b));
        } else {
            if constexpr (SAME<C, Int8>) {
                if (__any_sync(FULL_WARP, rotated)) {
                    float spread_a[N], spread_b[N];
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        spread_a[j] = a[j];
                        spread_b[j] = b[j];
                    }
                    spread<LANES>(spread_a, spread_b);
                    const float factor =
                        head < num_heads ? spread_factor_of_q(D) : spread_factor_of_k(D);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        a[j] = rotated ? spread_a[j] * factor : a[j];
                        b[j] = rotated ? spread_b[j] * factor : b[j];
                    }
                }
            }
            const bool is_cached = head >= num_heads || head < 0;
            __half scale = {};
            if (__any_sync(FULL_WARP, is_cached)) {  // queries need no scale
                const float largest = largest_of<GROUP>(a, b);
                float code = C::LARGEST;  // what the largest value becomes
                if constexpr (SAME<C, Fp8>) {
                    const bool is_key = rotated && is_cached;
                    if (__any_sync(FULL_WARP, is_key)) {
                        const int best = best_scale<GROUP>(a, b, largest);
                        if (is_key) code = KeyScales::code_of(best);
                    }
                }
                scale = scale_of(largest, code);
            }
            if (!mine) return;
            if (head < num_heads) {
                T* const target = q_out + token * q_stride + head * D + column;
                store_vector(target, pack<T>(a));
                store_vector(target + HALF, pack<T>(b));
                return;
            }
            if (block < 0) return;
            C* const target = place_of(head);
            const float inverse = inverse_of(scale);
            store_bytes(target, a, inverse);
            store_bytes(target + HALF, b, inverse);
            if (lane > 0) return;
            __half* const scales = reinterpret_cast<__half*>(
                cache_of(head) + block * block_stride + scales_offset(block_size, num_kv_heads, D));
            scales[kv_head_of(head) * block_size + offset] = scale;
        }
    };
#pragma unroll 1
    for (int base = rehearsed ? -heads_at_once : 0; base < all_heads; base += heads_at_once) {
        const int head = base + first;
        float a[N], b[N];
        unpack<T>(low, a);
        unpack<T>(high, b);
        if (base >= 0) load(head + heads_at_once);
        process(head, lane < LANES && base >= 0 && head < all_heads, a, b);
        if (base < 0) {
            pdl_wait();
            load(first);
        }
    }
}
