// The experts of a token, from the router's logits.
#pragma once

#include "common.cuh"

// How experts are chosen. Logits are the sums of `parts` products with `rows` columns each, the
// last one of which is the gate of the shared expert, if that has one; `stride` from a token to the
// next. A shared expert may be kept as `num_shared` experts behind the others, which all tokens
// have.
struct RouterParams {
    const float* bias;         // [num_experts], or null
    const float* select_bias;  // [num_experts], or null
    int num_experts, top_k, parts, rows, stride;
    int flags, num_groups, top_groups, shared_gate, num_shared;
    float scale;

    __device__ int all_experts() const { return num_experts + num_shared; }
    __device__ int all_top_k() const { return top_k + num_shared; }
};

// As torch_ops.moe.Routing has them.
constexpr int SIGMOID = 1, RENORMALIZE = 2, BEST_ALONE = 4;

constexpr float LOWEST = -3.402823466e38f;

// Floats in the order of these keys, none of which is 0. NaN has a place as well.
__device__ inline unsigned key_of(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f);  // of -0 the key of 0
    return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}

__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// The lowest `index` of the lanes with the highest key; all lanes have the result.
__device__ inline int first_of_highest(unsigned key, int index) {
#if __CUDA_ARCH__ >= 800
    const unsigned highest = __reduce_max_sync(FULL_WARP, key);
    return __reduce_min_sync(FULL_WARP, key == highest ? index : 0x7fffffff);
#else
    return 0;
#endif
}

// Which groups a token's experts are in, as bits: those with the highest sums of their two highest
// ranks, or with the highest ranks (BEST_ALONE). `ranks` [num_experts] in shared memory.
__device__ inline unsigned chosen_groups(const float* ranks, int num_experts, int num_groups,
                                         int top_groups, int flags) {
    const int lane = threadIdx.x % 32, size = num_experts / num_groups;
    unsigned key = 0;
    if (lane < num_groups) {
        float first = LOWEST, second = LOWEST;
#pragma unroll 1
        for (int i = 0; i < size; i++) {
            const float rank = ranks[lane * size + i];
            second = fmaxf(second, fminf(first, rank));
            first = fmaxf(first, rank);
        }
        key = key_of(size > 1 && !(flags & BEST_ALONE) ? first + second : first);
    }
    unsigned chosen = 0;
#pragma unroll 1
    for (int i = 0; i < top_groups; i++) {
        const int group = first_of_highest(key, lane);
        chosen |= 1u << group;
        if (lane == group) key = 0;
    }
    return chosen;
}

// A token's experts, by one warp: lane r has the r-th expert and its weight. `logit` returns that
// of a column.
template <int PER_LANE, class Logit>
__device__ int choose(const Logit& logit, const RouterParams& router, float* ranks, float& weight) {
    const int lane = threadIdx.x % 32, num_experts = router.num_experts;
    float score[PER_LANE], rank[PER_LANE], largest = LOWEST;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int expert = lane + 32 * i;
        score[i] = router.bias && expert < num_experts ? router.bias[expert] : 0.0f;
    }
#pragma unroll 1
    for (int part = 0; part < router.parts; part++) {
        float more[PER_LANE];  // all loads before the first use
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int expert = lane + 32 * i;
            more[i] = expert < num_experts ? logit(part * router.rows + expert) : LOWEST;
        }
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) score[i] += more[i];
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        rank[i] = score[i];
        largest = fmaxf(largest, score[i]);
    }
    // Renormalized, scores of a softmax are a softmax over the chosen experts alone.
    const bool renormalizes = router.flags & RENORMALIZE;
    const bool only_chosen = renormalizes && !(router.flags & SIGMOID) && !router.select_bias;
    if (router.flags & SIGMOID) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) rank[i] = score[i] = sigmoid(score[i]);
    } else if (!only_chosen) {
        largest = warp_max(largest);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            score[i] = __expf(score[i] - largest);
            sum += score[i];
        }
        const float inverse = __fdividef(1.0f, warp_sum(sum));
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) score[i] *= inverse;
    }
    unsigned key[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int expert = lane + 32 * i;
        if (router.select_bias && expert < num_experts)
            rank[i] = score[i] + router.select_bias[expert];
        key[i] = expert < num_experts ? key_of(rank[i]) : 0;
    }
    if (router.top_groups < router.num_groups) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (lane + 32 * i < num_experts) ranks[lane + 32 * i] = rank[i];
        __syncwarp();
        const unsigned chosen =
            chosen_groups(ranks, num_experts, router.num_groups, router.top_groups, router.flags);
        const int size = num_experts / router.num_groups;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (!(chosen >> min((lane + 32 * i) / size, 31) & 1)) key[i] = 0;
        __syncwarp();
    }

    int own = 0;
    weight = 0.0f;
#pragma unroll 1
    for (int r = 0; r < router.top_k; r++) {
        unsigned highest = 0;
        int index = 0x7ffffffe;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (key[i] > highest) {
                highest = key[i];
                index = lane + 32 * i;
            }
        const int expert = first_of_highest(highest, index);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (expert == lane + 32 * i) key[i] = 0;
        if (lane == r) own = expert;
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const float found = __shfl_sync(FULL_WARP, score[i], own % 32);
        if (lane < router.top_k && own / 32 == i) weight = found;
    }
    if (only_chosen) {
        const float first = __shfl_sync(FULL_WARP, weight, 0);  // the highest
        weight = lane < router.top_k ? __expf(weight - first) : 0.0f;
    }
    if (renormalizes) weight = __fdividef(weight, warp_sum(weight) + 1e-20f);
    weight *= router.scale;
    return own;
}

// The weight of the shared expert of a token with these logits; 1 without a gate.
template <class Logit>
__device__ float shared_weight(const Logit& logit, const RouterParams& router) {
    if (!router.shared_gate) return 1.0f;
    float gate = 0.0f;
#pragma unroll 1
    for (int part = 0; part < router.parts; part++)
        gate += logit(part * router.rows + router.num_experts);
    return sigmoid(gate);
}

// `choose`, and after a token's own experts the shared ones: lane r has the r-th of all_top_k()
// experts and its weight; `shared` becomes that of the shared expert.
template <int PER_LANE, class Logit>
__device__ int choose_all_of(const Logit& logit, const RouterParams& router, float* ranks,
                             float& weight, float& shared) {
    const int lane = threadIdx.x % 32, own = choose<PER_LANE>(logit, router, ranks, weight);
    shared = shared_weight(logit, router);
    if (lane < router.top_k || lane >= router.all_top_k()) return own;
    weight = shared;
    return router.num_experts + lane - router.top_k;
}

// `choose_all_of` for a token of a batch, by one warp: returns the expert of lane r, and writes the
// token's weights.
template <int PER_LANE>
__device__ int choose_for(const float* logits, const RouterParams& router, int token, float* ranks,
                          float* weights) {
    const int lane = threadIdx.x % 32, all_top_k = router.all_top_k();
    const float* const own = logits + static_cast<long long>(token) * router.stride;
    const auto logit = [own](int column) { return load_l2(own + column); };
    float weight, shared;
    const int expert = choose_all_of<PER_LANE>(logit, router, ranks, weight, shared);
    float* const to = weights + static_cast<long long>(token) * (all_top_k + 1);
    if (lane < all_top_k) to[lane] = weight;
    if (lane == 0) to[all_top_k] = shared;
    return expert;
}
