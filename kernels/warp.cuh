// What one warp does together, and half precision by the register: two halfs in 32 bits, as the tensor cores read them.
// A lane is called by g = lane / 4 and t = lane % 4, the names of the PTX manual's fragment tables.
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;

// Accumulators of one 16 x 8 tile: rows g and g + 8, columns 2t and 2t + 1.
struct Tile {
    float c0, c1, c2, c3;
};

// A 16 x 16 operand, row-major: (row g, columns 2t and 2t + 1), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8).
struct Rows16 {
    u32 a0, a1, a2, a3;
};

// A 16 x 8 operand: rows 2t and 2t + 1, rows 2t + 8 and 2t + 9, both of column g.
struct Columns8 {
    u32 b0, b1;
};

#ifdef WQLAB_EMULATED
#include "emulate.h"
#else
#include <cuda_fp16.h>

__device__ __forceinline__ u32 as_u32(__half2 x) { return *reinterpret_cast<u32*>(&x); }
__device__ __forceinline__ __half2 as_half2(u32 x) { return *reinterpret_cast<__half2*>(&x); }

__device__ __forceinline__ u32 multiply2(u32 x, u32 y) { return as_u32(__hmul2(as_half2(x), as_half2(y))); }
__device__ __forceinline__ u32 pack2(float low, float high) { return as_u32(__floats2half2_rn(low, high)); }
__device__ __forceinline__ float low_float(u32 x) { return __low2float(as_half2(x)); }
__device__ __forceinline__ float high_float(u32 x) { return __high2float(as_half2(x)); }

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }
__device__ __forceinline__ uint4 load_global16(const void* pointer) { return __ldg(static_cast<const uint4*>(pointer)); }

// Rounded up, to nearest; `half_up` returns bits.
__device__ __forceinline__ float subtract_up(float x, float y) { return __fsub_ru(x, y); }
__device__ __forceinline__ float divide_up(float x, float y) { return __fdiv_ru(x, y); }
__device__ __forceinline__ float divide_nearest(float x, float y) { return __fdiv_rn(x, y); }
__device__ __forceinline__ u32 half_up(float x) { return __half_as_ushort(__float2half_ru(x)); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// (x & mask) | 0x64006400 in one instruction: a code of few bits becomes the half 1024 + code.
template <u32 MASK>
__device__ __forceinline__ u32 codes_to_halfs(u32 x) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(x), "n"(MASK), "n"(0x64006400));
    return y;
}

// c += a b, 16 x 8 x 16, products exact, sums in float32.
__device__ __forceinline__ void multiply_add(Tile& c, const Rows16& a, const Columns8& b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.c0), "+f"(c.c1), "+f"(c.c2), "+f"(c.c3)
        : "r"(a.a0), "r"(a.a1), "r"(a.a2), "r"(a.a3), "r"(b.b0), "r"(b.b1));
}

// Transposes an 8 x 8 matrix of halfs: from (row g, columns 2t and 2t + 1) to (column g, rows 2t and 2t + 1).
__device__ __forceinline__ u32 transpose8(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(128) unsigned char memory[];
    return memory;
}
__device__ __forceinline__ u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// Four 8 x 8 matrices of halfs; lane i points at row i % 8 of matrix i / 8.
__device__ __forceinline__ Rows16 load_matrices(const void* row) {
    Rows16 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.a0), "=r"(x.a1), "=r"(x.a2), "=r"(x.a3) : "r"(shared_address(row)) : "memory");
    return x;
}
__device__ __forceinline__ Rows16 load_matrices_transposed(const void* row) {
    Rows16 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.a0), "=r"(x.a1), "=r"(x.a2), "=r"(x.a3) : "r"(shared_address(row)) : "memory");
    return x;
}

__device__ __forceinline__ uint4 load_shared16(const void* pointer) { return *static_cast<const uint4*>(pointer); }
__device__ __forceinline__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xFFFFFFFF, x, lanes); }
__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xFFFFFFFF, x); }
__device__ __forceinline__ u32 lanes_that(bool x) { return __ballot_sync(0xFFFFFFFF, x); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }

__device__ __forceinline__ void store_half(void* to, float x) { *static_cast<__half*>(to) = __float2half_rn(x); }

// What this block wrote is seen by a block that counts up later. `count_up` returns the old count and wraps to 0 after `most`.
__device__ __forceinline__ void publish_block() {
    __threadfence();
    __syncthreads();
}
__device__ __forceinline__ void receive_block() { __threadfence(); }
__device__ __forceinline__ unsigned count_up(unsigned* counter, unsigned most) { return atomicInc(counter, most); }

// Copies that land in shared memory while the warp works. All lanes start the copies of one unit and `close` it; `wait_for` then waits
// for the oldest unit. From sm_90 on the copy engine does it, one instruction per contiguous run; before, each lane takes 16 bytes at
// a time. Addresses and sizes are multiples of 16.
#if __CUDA_ARCH__ >= 900
struct Arrival {
    u64 barrier;
};
__device__ __forceinline__ void prepare(Arrival* arrival) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrival)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine sees the barrier as it is now
}
__device__ __forceinline__ void copy_run(void* to, const void* from, u32 bytes, Arrival* arrival) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(arrival)) : "memory");
}
__device__ __forceinline__ void copy_together(int lane, void* to, const void* from, u32 bytes, Arrival* arrival) {
    if (lane == 0) copy_run(to, from, bytes, arrival);
}
__device__ __forceinline__ void close(int lane, Arrival* arrival, u32 bytes) {
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void close_nothing() {}
template <int STAGES>
__device__ __forceinline__ void wait_for(Arrival* arrival, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
                     shared_address(arrival)), "r"(parity) : "memory");
}
#else
struct Arrival {};
__device__ __forceinline__ void prepare(Arrival*) {}
__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_run(void* to, const void* from, u32 bytes, Arrival*) {
    for (u32 at = 0; at < bytes; at += 16) copy16(static_cast<char*>(to) + at, static_cast<const char*>(from) + at);
}
__device__ __forceinline__ void copy_together(int lane, void* to, const void* from, u32 bytes, Arrival*) {
    for (u32 at = 16 * lane; at < bytes; at += 16 * 32) copy16(static_cast<char*>(to) + at, static_cast<const char*>(from) + at);
}
__device__ __forceinline__ void close(int, Arrival*, u32) { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void close_nothing() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int STAGES>
__device__ __forceinline__ void wait_for(Arrival*, u32) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncwarp();
}
#endif
#endif
