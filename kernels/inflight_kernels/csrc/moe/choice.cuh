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
    // all_experts(), rounded up to whole warps.
    __device__ int padded_experts() const { return (all_experts() + 31) / 32 * 32; }
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

// The experts of a token, chosen by one warp, the highest rank first. Not all have to be chosen at
// once: what needs the first ones need not wait for the others.
template <int PER_LANE>
struct Ranking {
    float score[PER_LANE];
    unsigned key[PER_LANE];  // of the rank of expert lane + 32 * i; 0 once that is chosen
    int own;                 // lane r has the r-th expert

    // `logit` returns that of a column; `ranks` [num_experts] in shared memory, if there are
    // groups.
    template <class Logit>
    __device__ Ranking(const Logit& logit, const RouterParams& router, float* ranks) : own(0) {
        const int lane = threadIdx.x % 32, num_experts = router.num_experts;
        float rank[PER_LANE], largest = LOWEST;
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
        if (router.flags & SIGMOID) {
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) rank[i] = score[i] = sigmoid(score[i]);
        } else if (!only_chosen(router)) {
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
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int expert = lane + 32 * i;
            if (router.select_bias && expert < num_experts)
                rank[i] = score[i] + router.select_bias[expert];
            key[i] = expert < num_experts ? key_of(rank[i]) : 0;
        }
        if (router.top_groups >= router.num_groups) return;
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

    // Choose the experts from the `first` to before the `end`; those before have been chosen.
    __device__ void choose(int first, int end) {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int r = first; r < end; r++) {
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
    }

    // The expert of this lane; those of the token are followed by the shared ones.
    __device__ int expert(const RouterParams& router) const {
        const int lane = threadIdx.x % 32;
        return lane < router.top_k ? own : router.num_experts + lane - router.top_k;
    }

    // Of the token's own experts, once all are chosen.
    __device__ float weight(const RouterParams& router) const {
        const int lane = threadIdx.x % 32;
        float weight = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const float found = __shfl_sync(FULL_WARP, score[i], own % 32);
            if (lane < router.top_k && own / 32 == i) weight = found;
        }
        if (only_chosen(router)) {
            const float first = __shfl_sync(FULL_WARP, weight, 0);  // the highest
            weight = lane < router.top_k ? __expf(weight - first) : 0.0f;
        }
        if (router.flags & RENORMALIZE) weight = __fdividef(weight, warp_sum(weight) + 1e-20f);
        return weight * router.scale;
    }

   private:
    // Renormalized, scores of a softmax are a softmax over the chosen experts alone.
    static __device__ bool only_chosen(const RouterParams& router) {
        return router.flags & RENORMALIZE && !(router.flags & SIGMOID) && !router.select_bias;
    }
};

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

// Writes the weights of a token's experts, all of which are chosen, then that of the shared expert.
template <int PER_LANE, class Logit>
__device__ void write_weights(const Ranking<PER_LANE>& ranking, const Logit& logit,
                              const RouterParams& router, float* to) {
    const int lane = threadIdx.x % 32, all_top_k = router.all_top_k();
    const float shared = shared_weight(logit, router), weight = ranking.weight(router);
    if (lane < all_top_k) to[lane] = lane < router.top_k ? weight : shared;
    if (lane == 0) to[all_top_k] = shared;
}

// The experts of a token of a batch, by one warp: returns that of lane r, and writes the weights.
template <int PER_LANE>
__device__ int choose_for(const float* logits, const RouterParams& router, int token, float* ranks,
                          float* weights) {
    const float* const own = logits + static_cast<long long>(token) * router.stride;
    const auto logit = [own](int column) { return load_l2(own + column); };
    Ranking<PER_LANE> ranking(logit, router, ranks);
    ranking.choose(0, router.top_k);
    write_weights(ranking, logit, router,
                  weights + static_cast<long long>(token) * (router.all_top_k() + 1));
    return ranking.expert(router);
}
