// A GPU in one thread: each CUDA thread is a fiber, and what a warp does together (mma, movmatrix, ldmatrix, shuffles) is a
// meeting of its 32 fibers, computed by the PTX manual's fragment tables. Slow, exact, and without any hardware: the kernel's own
// source runs, so its index arithmetic and its numerics are tested where there is no GPU. It says nothing about races or speed:
// fibers switch at meetings only, and asynchronous copies are finished when they start.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n)

using half = _Float16;
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct uint4 {
    u32 x, y, z, w;
};
using std::fmaxf;
template <class T>
T min(T a, T b) {
    return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
    return a > b ? a : b;
}

namespace emulation {
struct Meeting {  // of the fibers of a warp, or of a block
    int size = 0, here = 0;
    long round = 0;
};
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
};
inline std::vector<Fiber> fibers;
inline std::vector<Meeting> warps;
inline Meeting block;
inline ucontext_t scheduler;
inline int current = 0;
inline unsigned char* shared_memory = nullptr;
inline std::vector<std::vector<unsigned char>> desks;  // of each warp: 64 bytes a lane
inline std::function<void()> body;
constexpr int DESK = 64;

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }
inline void meet(Meeting& meeting) {
    long round = meeting.round;
    if (++meeting.here == meeting.size) {
        meeting.here = 0;
        ++meeting.round;
    } else {
        while (meeting.round == round) yield();
    }
}
inline void enter() {
    body();
    fibers[current].done = true;
    yield();
}
// Every lane lays something down, all wait, every lane looks at what all laid down, all wait again.
template <class In, class Look>
void together(const In& mine, Look look) {
    static_assert(sizeof(In) <= DESK);
    auto& desk = desks[current / 32];
    std::memcpy(desk.data() + current % 32 * DESK, &mine, sizeof(In));
    meet(warps[current / 32]);
    look([&](int lane) {
        In theirs;
        std::memcpy(&theirs, desk.data() + lane * DESK, sizeof(In));
        return theirs;
    });
    meet(warps[current / 32]);
}
inline float at(u32 pair, int which) {
    uint16_t bits = uint16_t(pair >> (16 * which));
    half x;
    std::memcpy(&x, &bits, 2);
    return float(x);
}
inline u32 pair_of(half low, half high) {
    uint16_t a, b;
    std::memcpy(&a, &low, 2), std::memcpy(&b, &high, 2);
    return a | u32(b) << 16;
}
}  // namespace emulation

inline dim3 gridDim, blockIdx;
struct ThreadIndex {
    struct {
        operator int() const { return emulation::current; }
    } x;
};
inline ThreadIndex threadIdx;

inline u32 multiply2(u32 x, u32 y) {
    using namespace emulation;
    return pair_of(half(at(x, 0) * at(y, 0)), half(at(x, 1) * at(y, 1)));
}
inline u32 pack2(float low, float high) { return emulation::pair_of(half(low), half(high)); }
inline float low_float(u32 x) { return emulation::at(x, 0); }
inline float high_float(u32 x) { return emulation::at(x, 1); }
inline uint4 load_global16(const void* pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16) std::abort();
    return *static_cast<const uint4*>(pointer);
}
inline float least(float x, float y) { return x != x || y != y ? NAN : std::fmin(x, y); }
inline float most(float x, float y) { return x != x || y != y ? NAN : std::fmax(x, y); }
inline u32 minimum2(u32 x, u32 y) {
    using namespace emulation;
    return pair_of(half(least(at(x, 0), at(y, 0))), half(least(at(x, 1), at(y, 1))));
}
inline u32 maximum2(u32 x, u32 y) {
    using namespace emulation;
    return pair_of(half(most(at(x, 0), at(y, 0))), half(most(at(x, 1), at(y, 1))));
}
inline u32 low_halves(u32 x, u32 y) { return (x & 0xFFFFu) | y << 16; }
inline u32 high_halves(u32 x, u32 y) { return x >> 16 | (y & 0xFFFF0000u); }
inline u32 bits_of(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
template <int N>
void store_words(void* to, const u32 (&x)[N]) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof x) std::abort();
    std::memcpy(to, x, sizeof x);
}
// A difference or a quotient of halfs is exact in float64, or so near that rounding up from there is right.
inline float float_up(double x) {
    float y = float(x);
    return double(y) < x ? std::nextafter(y, INFINITY) : y;
}
inline float subtract_up(float x, float y) { return float_up(double(x) - double(y)); }
inline float divide_up(float x, float y) { return float_up(double(x) / double(y)); }
inline u32 half_up(float x) {
    half y = half(x);
    uint16_t bits;
    std::memcpy(&bits, &y, 2);
    return float(y) < x ? bits + 1u : bits;
}
using std::fminf;
inline float minus_infinity() { return -INFINITY; }
inline float exp2_fast(float x) { return std::exp2(x); }
// The tensor core adds sixteen products to the sum at once; here in float64, rounded once. `WQLAB_TRUNCATED` keeps 24 bits below the
// largest term instead, cut off, which is worse than what the hardware was seen to do.
inline float add_products(float c, const double (&product)[16]) {
#ifdef WQLAB_TRUNCATED
    double largest = std::fabs(c);
    for (double p : product) largest = std::fmax(largest, std::fabs(p));
    if (largest == 0 || !std::isfinite(largest)) {
        double sum = c;
        for (double p : product) sum += p;
        return float(sum);
    }
    double grid = std::ldexp(1.0, std::ilogb(largest) - 24), sum = std::trunc(c / grid);
    for (double p : product) sum += std::trunc(p / grid);
    return float(sum * grid);
#else
    double sum = c;
    for (double p : product) sum += p;
    return float(sum);
#endif
}
inline void multiply_add(Tile& c, const Rows16& a, const Columns8& b) {
    using namespace emulation;
    struct Both {
        Rows16 a;
        Columns8 b;
    };
    together(Both{a, b}, [&](auto theirs) {
        const int lane = current % 32, g = lane / 4, t = lane % 4;
        float* out[4] = {&c.c0, &c.c1, &c.c2, &c.c3};
        Both all[32];
        for (int i = 0; i < 32; ++i) all[i] = theirs(i);
        for (int i = 0; i < 4; ++i) {
            const int row_half = i / 2, column = 2 * t + i % 2;
            double product[16];
            for (int k = 0; k < 16; ++k) {
                const Rows16& x = all[4 * g + k % 8 / 2].a;
                const Columns8& y = all[4 * column + k % 8 / 2].b;
                const u32 left = row_half ? (k < 8 ? x.a1 : x.a3) : (k < 8 ? x.a0 : x.a2);
                product[k] = double(at(left, k % 2)) * double(at(k < 8 ? y.b0 : y.b1, k % 2));
            }
            *out[i] = add_products(*out[i], product);
        }
    });
}
inline void multiply_add_in_order(Tile& c, const Rows16& a, const Columns8& b) { multiply_add(c, a, b); }
inline void multiply_add(Tile& c, u32 a0, u32 a1, u32 b) { multiply_add(c, Rows16{a0, a1, 0, 0}, Columns8{b, 0}); }
inline u32 transpose8(u32 x) {
    using namespace emulation;
    u32 y = 0;
    together(x, [&](auto theirs) {
        const int lane = current % 32, g = lane / 4, t = lane % 4;
        for (int i = 0; i < 2; ++i) y |= ((theirs(4 * (2 * t + i) + g / 2) >> (16 * (g % 2))) & 0xFFFFu) << (16 * i);
    });
    return y;
}
inline Rows16 load_matrices_of(const void* row, bool transposed) {
    using namespace emulation;
    Rows16 result;
    together(row, [&](auto theirs) {
        const int lane = current % 32, g = lane / 4, t = lane % 4;
        u32* out[4] = {&result.a0, &result.a1, &result.a2, &result.a3};
        for (int m = 0; m < 4; ++m) {
            u32 x = 0;
            for (int i = 0; i < 2; ++i) {
                const int r = transposed ? 2 * t + i : g, c = transposed ? g : 2 * t + i;
                uint16_t bits;
                std::memcpy(&bits, static_cast<const char*>(theirs(8 * m + r)) + 2 * c, 2);
                x |= u32(bits) << (16 * i);
            }
            *out[m] = x;
        }
    });
    return result;
}
inline Rows16 load_matrices(const void* row) { return load_matrices_of(row, false); }
inline Rows16 load_matrices_transposed(const void* row) { return load_matrices_of(row, true); }
inline void check_aligned(const void* p, int size) {
    if (reinterpret_cast<uintptr_t>(p) % size) std::fprintf(stderr, "%p is not a multiple of %d\n", p, size), std::abort();
}
inline uint4 load_shared16(const void* pointer) {
    check_aligned(pointer, 16);
    return *static_cast<const uint4*>(pointer);
}
template <class T>
T shuffle_xor(T x, int lanes) {
    T y = 0;
    emulation::together(x, [&](auto theirs) { y = theirs((emulation::current % 32) ^ lanes); });
    return y;
}
inline float shuffle(float x, int lane) {
    float y = 0;
    emulation::together(x, [&](auto theirs) { y = theirs(lane); });
    return y;
}
inline bool any_lane(bool x) {
    bool any = false;
    emulation::together(x, [&](auto theirs) {
        for (int i = 0; i < 32; ++i) any |= theirs(i);
    });
    return any;
}
inline u32 lanes_that(bool x) {
    u32 lanes = 0;
    emulation::together(x, [&](auto theirs) {
        for (int i = 0; i < 32; ++i) lanes |= u32(theirs(i)) << i;
    });
    return lanes;
}
inline void sync_warp() { emulation::meet(emulation::warps[emulation::current / 32]); }
inline void sync_block() { emulation::meet(emulation::block); }
inline unsigned char* shared_memory() { return emulation::shared_memory; }
inline void store_half(void* to, float x) { *static_cast<half*>(to) = half(x); }
inline void publish_block() { sync_block(); }
inline void receive_block() {}
inline unsigned count_up(unsigned* counter, unsigned most) {
    unsigned old = *counter;
    *counter = old >= most ? 0 : old + 1;
    return old;
}
template <int N>
void load_newest(float (&x)[N], const float* pointer) {
    check_aligned(pointer, 4 * N);
    std::memcpy(x, pointer, sizeof x);
}
inline void copy16(void* to, const void* from) {
    check_aligned(to, 16), check_aligned(from, 16);
    std::memcpy(to, from, 16);
}
inline void copy16_or_zeros(void* to, const void* from, bool there) {
    check_aligned(to, 16), check_aligned(from, 16);
    there ? std::memcpy(to, from, 16) : std::memset(to, 0, 16);
}
inline void commit_copies() {}
template <int NEWEST>
void wait_copies() {
    sync_warp();
}

namespace emulation {
template <class Kernel>
void launch(dim3 grid, int threads, size_t shared_bytes, Kernel kernel) {
    constexpr size_t STACK = 256 << 10;
    std::vector<unsigned char> memory(shared_bytes + 128);
    shared_memory = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128);
    gridDim = grid;
    body = kernel;
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
                std::memset(memory.data(), 0xFF, memory.size());  // NaN, as far as halfs and floats go
                fibers = std::vector<Fiber>(threads);
                warps.assign(threads / 32, Meeting{32});
                desks.assign(threads / 32, std::vector<unsigned char>(32 * DESK));
                block = Meeting{threads};
                for (auto& fiber : fibers) {
                    fiber.stack.reset(new char[STACK]);
                    getcontext(&fiber.context);
                    fiber.context.uc_stack.ss_sp = fiber.stack.get();
                    fiber.context.uc_stack.ss_size = STACK;
                    fiber.context.uc_link = nullptr;
                    makecontext(&fiber.context, enter, 0);
                }
                for (int left = threads; left;)
                    for (current = 0; current < threads; ++current)
                        if (!fibers[current].done) {
                            swapcontext(&scheduler, &fibers[current].context);
                            left -= fibers[current].done;
                        }
            }
}
}  // namespace emulation
