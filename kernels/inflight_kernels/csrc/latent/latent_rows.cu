// Norm, RoPE and cache write of latent attention, for many tokens; for few, latent_products.cu does
// it on the way.
#include "latent/latent_row.cuh"

// One block per token; arguments as in latent::Rows.
template <typename T>
__global__ void __launch_bounds__(512)
    write_latent(const T* q, long long q_stride, int nope, const T* kv_a, long long kv_a_stride,
                 T* queries, int num_heads, T* cache, long long block_stride, int block_size,
                 const long long* slots, const long long* positions, const float* cos,
                 const float* sin, const float* weight, float eps, bool history_ready) {
    if (!history_ready) pdl_wait();
    pdl_launch_dependents();
    const latent::Rows<T> rows = {q,         kv_a,  q_stride,     kv_a_stride, nope,  queries,
                                  num_heads, cache, block_stride, block_size,  slots, positions,
                                  cos,       sin,   weight,       eps};
    latent::write_row(rows, blockIdx.x, history_ready);
}
