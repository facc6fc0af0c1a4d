// Copying of KV cache blocks and clearing of slots, as bytes. A layer here is any leading index.
#include "common.cuh"

// Grid: (parts of a block, layers). A thread copies one column, 16 bytes at the same offset of
// every block of a layer: it reads the column of all sources before it writes that of any target,
// so a block may be both. The values are staged in shared memory, num_pairs * 16 bytes per thread.
template <typename Id>
__global__ void __launch_bounds__(128)
    copy_blocks(uint4* caches, const Id* sources, const Id* targets, int num_pairs,
                int vectors_per_block, long long vectors_per_layer) {
    extern __shared__ uint4 waiting[];
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    pdl_launch_dependents();
    if (column >= vectors_per_block) return;

    uint4* layer = caches + blockIdx.y * vectors_per_layer + column;
#pragma unroll 8
    for (int i = 0; i < num_pairs; i++)
        waiting[i * blockDim.x + threadIdx.x] =
            layer[static_cast<long long>(sources[i]) * vectors_per_block];
#pragma unroll 4
    for (int i = 0; i < num_pairs; i++)
        layer[static_cast<long long>(targets[i]) * vectors_per_block] =
            waiting[i * blockDim.x + threadIdx.x];
}

// Grid: (slots, parts of a slot, layers); one thread per 16 bytes. Negative slots are skipped.
template <typename Id>
__global__ void __launch_bounds__(128)
    clear_slots(uint4* caches, const Id* slots, int vectors_per_slot, long long vectors_per_layer) {
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    pdl_wait();
    pdl_launch_dependents();
    const long long slot = slots[blockIdx.x];
    if (column >= vectors_per_slot || slot < 0) return;
    caches[blockIdx.z * vectors_per_layer + slot * vectors_per_slot + column] =
        make_uint4(0, 0, 0, 0);
}
