// What experts do with gate and up.
#pragma once

#include "linear/hopper_linear.cuh"

// What becomes of the rows of a weight: as they are, or 8 rows of gate and 8 of up by turns.
constexpr int PLAIN = 0, SILU = 1, CLAMPED = 2;

// The gate of gpt-oss (arXiv:2508.10925).
__device__ inline float clamped_swiglu(float gate, float up) {
    gate = fminf(gate, 7.0f);
    up = fminf(fmaxf(up, -7.0f), 7.0f);
    return __fdividef(gate, 1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
}
