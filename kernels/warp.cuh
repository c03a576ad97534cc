// What one warp does together, and half precision by the register: two halfs in 32 bits, as the tensor cores read them.
// A lane is called by g = lane / 4 and t = lane % 4, the names of the PTX manual's fragment tables.
#pragma once

using u32 = unsigned int;

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

__device__ __forceinline__ uint4 load_global16(const void* pointer) { return __ldg(static_cast<const uint4*>(pointer)); }
// NaN where one of the two is.
__device__ __forceinline__ u32 minimum2(u32 x, u32 y) { return as_u32(__hmin2_nan(as_half2(x), as_half2(y))); }
__device__ __forceinline__ u32 maximum2(u32 x, u32 y) { return as_u32(__hmax2_nan(as_half2(x), as_half2(y))); }
// The lower halfwords of two registers, or the upper ones; x's becomes the lower one.
__device__ __forceinline__ u32 low_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x7632); }
__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ void store_words(void* to, const u32 (&x)[1]) { *static_cast<u32*>(to) = x[0]; }
__device__ __forceinline__ void store_words(void* to, const u32 (&x)[2]) { *static_cast<uint2*>(to) = {x[0], x[1]}; }
__device__ __forceinline__ void store_words(void* to, const u32 (&x)[4]) { *static_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]}; }

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

// Rounded up; `half_up` returns bits.
__device__ __forceinline__ float subtract_up(float x, float y) { return __fsub_ru(x, y); }
__device__ __forceinline__ float divide_up(float x, float y) { return __fdiv_ru(x, y); }
__device__ __forceinline__ u32 half_up(float x) { return __half_as_ushort(__float2half_ru(x)); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// c += a b, 16 x 8 x 16, products exact, sums in float32.
__device__ __forceinline__ void multiply_add(Tile& c, const Rows16& a, const Columns8& b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.c0), "+f"(c.c1), "+f"(c.c2), "+f"(c.c3)
        : "r"(a.a0), "r"(a.a1), "r"(a.a2), "r"(a.a3), "r"(b.b0), "r"(b.b1));
}
// The same, and the compiler keeps such products in the order in which they are written.
__device__ __forceinline__ void multiply_add_in_order(Tile& c, const Rows16& a, const Columns8& b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.c0), "+f"(c.c1), "+f"(c.c2), "+f"(c.c3)
        : "r"(a.a0), "r"(a.a1), "r"(a.a2), "r"(a.a3), "r"(b.b0), "r"(b.b1));
}

// c += a b, 16 x 8 x 8: a0 is (row g, columns 2t and 2t + 1), a1 row g + 8; b is (rows 2t and 2t + 1, column g).
__device__ __forceinline__ void multiply_add(Tile& c, u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c.c0), "+f"(c.c1), "+f"(c.c2), "+f"(c.c3)
        : "r"(a0), "r"(a1), "r"(b));
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
__device__ __forceinline__ u32 shuffle_xor(u32 x, int lanes) { return __shfl_xor_sync(0xFFFFFFFF, x, lanes); }
__device__ __forceinline__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xFFFFFFFF, x, lanes); }
__device__ __forceinline__ float shuffle(float x, int lane) { return __shfl_sync(0xFFFFFFFF, x, lane); }
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

// Past the L1 cache, from a multiple of their size.
__device__ __forceinline__ void load_newest(float (&x)[1], const float* pointer) { x[0] = __ldcg(pointer); }
__device__ __forceinline__ void load_newest(float (&x)[2], const float* pointer) {
    const float2 y = __ldcg(reinterpret_cast<const float2*>(pointer));
    x[0] = y.x, x[1] = y.y;
}
__device__ __forceinline__ void load_newest(float (&x)[4], const float* pointer) {
    const float4 y = __ldcg(reinterpret_cast<const float4*>(pointer));
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

// Copies that land in shared memory while the warp works, each lane its 16 bytes. A lane closes a group of them with `commit_copies`;
// `wait_copies` waits for all but its newest NEWEST groups, and for what the other lanes of the warp waited for.
__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16_or_zeros(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int NEWEST>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
    __syncwarp();
}
#endif
