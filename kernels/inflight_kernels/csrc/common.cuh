// Shared by all kernels: 16-byte vectors of any storage type, reductions, dependent launch.
//
// Values are stored as float, half or bfloat16; arithmetic is in float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr unsigned FULL_WARP = 0xffffffffu;

// ---------------------------------------------------------------- templates

// Both are in libcu++ too, but that takes half a second to parse, more than most kernels.

// Whether A and B are the same type.
template <typename A, typename B>
constexpr bool SAME = false;
template <typename A>
constexpr bool SAME<A, A> = true;

// 0, 1 .. N - 1 as a pack.
template <int... I>
struct Indices {};
template <int N, int... I>
struct IndicesUpTo : IndicesUpTo<N - 1, N - 1, I...> {};
template <int... I>
struct IndicesUpTo<0, I...> {
    using type = Indices<I...>;
};

// ---------------------------------------------------------------- storage types

// A 32-bit word of a storage type, and the floats in it.
template <typename T>
struct Word;

template <>
struct Word<float> {
    static constexpr int size = 1;
    static __device__ void unpack(unsigned word, float* values) { values[0] = __uint_as_float(word); }
    static __device__ unsigned pack(const float* values) { return __float_as_uint(values[0]); }
};

template <>
struct Word<__half> {
    static constexpr int size = 2;
    static __device__ void unpack(unsigned word, float* values) {
        values[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xffffu)));
        values[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
    }
    static __device__ unsigned pack(const float* values) {
        return static_cast<unsigned>(__half_as_ushort(__float2half_rn(values[0]))) |
               static_cast<unsigned>(__half_as_ushort(__float2half_rn(values[1]))) << 16;
    }
};

template <>
struct Word<__nv_bfloat16> {
    static constexpr int size = 2;
    static __device__ void unpack(unsigned word, float* values) {
        values[0] = __uint_as_float(word << 16);
        values[1] = __uint_as_float(word & 0xffff0000u);
    }
    static __device__ unsigned pack(const float* values) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(values[0], values[1]);
        return static_cast<unsigned>(__bfloat16_as_ushort(both.x)) |
               static_cast<unsigned>(__bfloat16_as_ushort(both.y)) << 16;
    }
};

// Values of T in a 16-byte vector, the widest memory access of a thread.
template <typename T>
constexpr int VECTOR = 16 / sizeof(T);

template <typename T>
__device__ void unpack(const uint4& raw, float (&values)[VECTOR<T>]) {
    constexpr int size = Word<T>::size;
    Word<T>::unpack(raw.x, values);
    Word<T>::unpack(raw.y, values + size);
    Word<T>::unpack(raw.z, values + 2 * size);
    Word<T>::unpack(raw.w, values + 3 * size);
}

// Rounds to nearest even.
template <typename T>
__device__ uint4 pack(const float (&values)[VECTOR<T>]) {
    constexpr int size = Word<T>::size;
    return make_uint4(Word<T>::pack(values), Word<T>::pack(values + size),
                      Word<T>::pack(values + 2 * size), Word<T>::pack(values + 3 * size));
}

// A single value, rounded to nearest even.
template <typename T>
__device__ T narrow(float value);
template <>
__device__ inline float narrow<float>(float value) { return value; }
template <>
__device__ inline __half narrow<__half>(float value) { return __float2half_rn(value); }
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// Pointers to 16-byte vectors are not marked __restrict__ const: the compiler would then assume
// the data constant during the whole kernel and might move a load before pdl_wait().
template <typename T>
__device__ uint4 load_vector(const T* address) {
    return *reinterpret_cast<const uint4*>(address);
}

template <typename T>
__device__ void store_vector(T* address, const uint4& raw) {
    *reinterpret_cast<uint4*>(address) = raw;
}

// Whole vectors of floats.
template <int N>
__device__ void load_floats(const float* address, float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
        unpack<float>(load_vector(address + i), *reinterpret_cast<float(*)[4]>(values + i));
}

// Loads bypassing L1, where a line may be stale after a write by another block or kernel. OFFSET is
// in bytes.
template <int OFFSET = 0, typename T>
__device__ __forceinline__ T load_l2(const T* address) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) % 16 == 0, "words or vectors");
    const auto place = __cvta_generic_to_global(address);
    unsigned words[sizeof(T) / 4];
    if constexpr (sizeof(T) == 4) {
        asm volatile("ld.global.cg.u32 %0, [%1 + %2];"
                     : "=r"(words[0])
                     : "l"(place), "n"(OFFSET)
                     : "memory");
    } else if constexpr (sizeof(T) == 8) {
        asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2 + %3];"
                     : "=r"(words[0]), "=r"(words[1])
                     : "l"(place), "n"(OFFSET)
                     : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < sizeof(T) / 16; ++i)
            asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
                         : "=r"(words[4 * i]), "=r"(words[4 * i + 1]), "=r"(words[4 * i + 2]),
                           "=r"(words[4 * i + 3])
                         : "l"(place + 16 * i), "n"(OFFSET)
                         : "memory");
    }
    T value;
    memcpy(&value, words, sizeof(T));
    return value;
}

// Have a line of memory in the L2 cache by the time that it is read.
__device__ inline void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ---------------------------------------------------------------- reductions

// Sum over each aligned group of WIDTH lanes, a power of two; returned to every lane. All lanes of
// the warp must call it.
template <int WIDTH = 32>
__device__ float warp_sum(float value) {
#pragma unroll
    for (int distance = WIDTH / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(FULL_WARP, value, distance);
    return value;
}

template <int WIDTH = 32>
__device__ float warp_max(float value) {
#pragma unroll
    for (int distance = WIDTH / 2; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, distance));
    return value;
}

// Sum over the block, whose size is a multiple of 32; returned to every thread. One barrier;
// `partial` must not be reused before another one.
__device__ inline float block_sum(float value, float (&partial)[32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    value = warp_sum(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return warp_sum(lane < num_warps ? partial[lane] : 0.0f);
}

// ---------------------------------------------------------------- programmatic dependent launch

// Whether a kernel may start before the preceding ones have ended.
#if __CUDA_ARCH__ >= 900
constexpr bool HAS_PDL = true;
#else
constexpr bool HAS_PDL = false;
#endif

// Wait until the preceding kernels have ended and their writes are visible. Before it, nothing that
// they write may be used, and nothing that they read may be written. No-op for a plain launch.
__device__ inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A launch fetches its instructions anew, and a kernel with little work waits for them longer than
// its work takes. If they begin before the preceding kernel has ended, its blocks may rehearse:
// they compute all with zeros instead of what they will read, and write nothing, before pdl_wait.
// With more than 64 tokens, a block for each, the products before leave no registers beside them.
constexpr int MAX_REHEARSING_BLOCKS = 64;

__device__ inline bool rehearses() { return HAS_PDL && gridDim.x <= MAX_REHEARSING_BLOCKS; }

// Let the next kernel start, up to its own pdl_wait(), once all blocks have called this. Calling it
// before a kernel's own wait lets a whole chain of kernels start, whose blocks then compete for
// multiprocessors: useful only if the next kernel has much to do before its wait.
//
// Besides data that no kernel writes, a kernel may read before its wait what was written before
// some kernel in between that calls this only after its own wait: nothing starts after that one
// until all kernels before it have ended. Such data is called history_ready, and is read with
// load_l2.
__device__ inline void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
