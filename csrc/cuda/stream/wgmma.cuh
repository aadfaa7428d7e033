// sums += W x for one warp's strip of 16 rows and 17 to 128 tokens, by Hopper's warpgroup products (sm_90a).
//
// Caller: Consumer::accumulate.    Bytes: the chunks' weights once, their x once per four warps.
// Mapping: four warps are the 64 rows of an m64nNk16. A (weights, times gamma) comes from registers, B from shared memory,
// where the tensor cores read x by themselves: mma.sync would have every warp read it, 64 KB for 16 KB of weights.
#pragma once

#include "cuda/stream/reduce.cuh"

namespace eaglex::stream {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// D[64 x 32] += A B; acc from tile t on. B by its descriptor.
template <int kTokenTiles>
__device__ __forceinline__ void wgmma_32(float (&acc)[kTokenTiles][4], int t, const std::uint32_t (&a)[4],
                                         std::uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
      : "+f"(acc[t][0]), "+f"(acc[t][1]), "+f"(acc[t][2]), "+f"(acc[t][3]), "+f"(acc[t + 1][0]), "+f"(acc[t + 1][1]),
        "+f"(acc[t + 1][2]), "+f"(acc[t + 1][3]), "+f"(acc[t + 2][0]), "+f"(acc[t + 2][1]), "+f"(acc[t + 2][2]),
        "+f"(acc[t + 2][3]), "+f"(acc[t + 3][0]), "+f"(acc[t + 3][1]), "+f"(acc[t + 3][2]), "+f"(acc[t + 3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// D[64 x 64] += A B.
template <int kTokenTiles>
__device__ __forceinline__ void wgmma_64(float (&acc)[kTokenTiles][4], int t, const std::uint32_t (&a)[4],
                                         std::uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : "+f"(acc[t][0]), "+f"(acc[t][1]), "+f"(acc[t][2]), "+f"(acc[t][3]), "+f"(acc[t + 1][0]), "+f"(acc[t + 1][1]),
        "+f"(acc[t + 1][2]), "+f"(acc[t + 1][3]), "+f"(acc[t + 2][0]), "+f"(acc[t + 2][1]), "+f"(acc[t + 2][2]),
        "+f"(acc[t + 2][3]), "+f"(acc[t + 3][0]), "+f"(acc[t + 3][1]), "+f"(acc[t + 3][2]), "+f"(acc[t + 3][3]),
        "+f"(acc[t + 4][0]), "+f"(acc[t + 4][1]), "+f"(acc[t + 4][2]), "+f"(acc[t + 4][3]), "+f"(acc[t + 5][0]),
        "+f"(acc[t + 5][1]), "+f"(acc[t + 5][2]), "+f"(acc[t + 5][3]), "+f"(acc[t + 6][0]), "+f"(acc[t + 6][1]),
        "+f"(acc[t + 6][2]), "+f"(acc[t + 6][3]), "+f"(acc[t + 7][0]), "+f"(acc[t + 7][1]), "+f"(acc[t + 7][2]),
        "+f"(acc[t + 7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The compiler must not move what it does with a register over an asynchronous product that still uses it.
__device__ __forceinline__ void hold(float& x) {
  asm volatile("" : "+f"(x)::"memory");
}
__device__ __forceinline__ void hold(std::uint32_t& x) {
  asm volatile("" : "+r"(x)::"memory");
}

// What all precisions share: the products of a panel, 64 k of a stage, from operands in registers.
template <class Weights, int kTokenTiles, bool kNormed>
struct PanelMultiplier {
  using G = Geometry<Weights, kTokenTiles>;
  static constexpr int kSteps = kPanelK / 16;                                  // products of a panel
  static constexpr int kOctets = 2 * kSteps;                                   // of k
  static constexpr int kPanels = G::kChunkK / kPanelK;                         // of a chunk
  static constexpr int kPanelBytes = G::kTokens * kPanelK * 2;                 // of x
  static constexpr int kSquareTiles = kTokenTiles <= 8 ? 1 : kTokenTiles / 8;  // of 8 tokens, that a warp squares
  static_assert(!G::kWide || (G::kHalves == 1 && kPanels * kPanelK == G::kChunkK));

  const Ring& ring;
  const std::byte* shared;
  int squares_x;  // of the lane's token and octet of the first tile that the warp squares
  int lane;
  int warp;

  __device__ PanelMultiplier(const Ring& of, const std::byte* from, const SharedLayout& at, const WarpRole& role)
      : ring(of), shared(from), lane(role.lane), warp(role.warp) {
    squares_x = at.x + (role.strip % kTokenTiles * 8 + lane / 4) * 128 + (lane % 4 ^ lane / 4) * 16;
  }

  // Starts the products of a panel, once its x is there.
  __device__ __forceinline__ void start(int stage, int panel, const std::uint32_t (&a)[kSteps][4],
                                        float (&acc)[kTokenTiles][4]) const {
    // Rows of 128 bytes, swizzled: start and distance of 8 rows in units of 16 bytes. 16 k are 2 of them, 64 rows 512.
    // No sum below reaches the upper half, which is the same for all.
    const std::uint32_t begin = (ring.x + stage * ring.x_bytes + panel * kPanelBytes) >> 4 | 1U << 16;
    const auto b = [begin](int units) { return std::uint64_t{1U << 30 | 64U} << 32 | (begin + units); };
    __syncwarp();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kTokenTiles < 8) {
        wgmma_32(acc, 0, a[step], b(2 * step));
      } else {
#pragma unroll
        for (int t = 0; t < kTokenTiles; t += 8) wgmma_64(acc, t, a[step], b(2 * step + t * 64));
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ uint4 of_squares(int stage, int panel, int kb, int tile) const {
    return *reinterpret_cast<const uint4*>(shared + (squares_x ^ kb * 64) + stage * ring.x_bytes + panel * kPanelBytes +
                                           tile * 8192);
  }

  // As Multiplier::add_squares.
  __device__ __forceinline__ void add_squares(int stage, int panel, float (&squares)[kSquareTiles][4]) const {
#pragma unroll
    for (int tile = 0; tile < kSquareTiles; ++tile) {
#pragma unroll
      for (int kb = 0; kb < kPanelK / kKBlock; ++kb) {
        if (kTokenTiles == 4 && kb != warp / 4) continue;  // two warps share a tile
        const uint4 b = of_squares(stage, panel, kb, tile);
        const std::uint32_t first[4] = {b.x, 0, b.y, 0};
        const std::uint32_t second[4] = {b.z, 0, b.w, 0};
        mma_bf16(squares[tile], first, b.x, b.y);
        mma_bf16(squares[tile], second, b.z, b.w);
      }
    }
  }

  // Each token's sum to its place; Multiplier's order for up to 64 tokens.
  __device__ __forceinline__ void store_squares(const float (&squares)[kSquareTiles][4], float* to) const {
    const int g = lane / 4;
    if (g / 2 != lane % 4) return;
#pragma unroll
    for (int tile = 0; tile < kSquareTiles; ++tile)
      to[(kTokenTiles == 4 ? warp / 4 * G::kTokens + warp % 4 * 8 : (tile * 8 + warp) * 8) + g] =
          g % 2 == 0 ? squares[tile][0] : squares[tile][1];
  }
};

// bf16 weights: a chunk has one panel.
template <class Weights, int kTokenTiles, bool kNormed>
struct WideMultiplier : PanelMultiplier<Weights, kTokenTiles, kNormed> {
  using Base = PanelMultiplier<Weights, kTokenTiles, kNormed>;
  using Base::kOctets;
  using Base::kSquareTiles;
  using Base::kSteps;
  using Base::lane;
  using Base::ring;
  using Base::shared;
  using typename Base::G;
  static constexpr int kSquareSums = kSquareTiles;
  static constexpr float kRestLow = 1;
  static constexpr float kRestHigh = 1;
  static_assert(!G::kWide || Base::kPanels == 1);

  int weights;  // of the lane, in a stage
  int gamma;

  __device__ WideMultiplier(const Ring& of, const std::byte* from, const SharedLayout& at, const WarpRole& role)
      : Base(of, from, at, role) {
    const int q = lane % 4;
    // In words.h's order the 8 bytes that lane (g, q) multiplies of octet j lie in the unit of (g, j), half q / 2.
    weights = role.strip / 4 * (G::kStageBytes / G::kRowBlocks) + role.strip % 4 * 1024 + q / 2 * 512 +
              bf16_unit(lane / 4 * 4, q / 2) * 16 + q % 2 * 8;
    gamma = at.gamma + q * 4;
  }

  // The operands of a stage, once its weights have landed.
  __device__ __forceinline__ void load(int stage, std::uint32_t (&a)[kSteps][4]) const {
    const std::byte* const from = shared + stage * G::kStageBytes;
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      const uint2 rows =
          *reinterpret_cast<const uint2*>(from + (weights ^ octet % 4 * 16) + Weights::offset(octet / 4));
      a[octet / 2][octet % 2 * 2] = rows.x;
      a[octet / 2][octet % 2 * 2 + 1] = rows.y;
    }
    if constexpr (kNormed) {
      const std::byte* const by = shared + gamma + stage * G::kChunkK * 2;
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
        const auto pair = *reinterpret_cast<const std::uint32_t*>(by + octet * 16);
        std::uint32_t* const rows = a[octet / 2] + octet % 2 * 2;
        rows[0] = pack(__hmul2(unpack(rows[0]), unpack(pair)));
        rows[1] = pack(__hmul2(unpack(rows[1]), unpack(pair)));
      }
    }
  }

  // Sums of `chunks` chunks from `at` on. The next chunk's operands are fetched while the tensor cores work on one.
  __device__ __forceinline__ void add_chunks(int chunks, RingPosition& at, float (&acc)[kTokenTiles][4],
                                             float (&squares)[kSquareTiles][4]) const {
    std::uint32_t a[kSteps][4];
    mbar_wait(ring.landed + 8 * at.stage, at.phase);
    load(at.stage, a);
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
      mbar_wait(ring.full + 8 * at.stage, at.phase);
      fence_async_shared();  // x came by copies of threads, wgmma reads as bulk copies do
      this->start(at.stage, 0, a, acc);
      if constexpr (kNormed) this->add_squares(at.stage, 0, squares);
      RingPosition next = at;
      next.next(ring);
      std::uint32_t ahead[kSteps][4] = {};
      if (i + 1 < chunks) {
        mbar_wait(ring.landed + 8 * next.stage, next.phase);
        load(next.stage, ahead);
      }
      wgmma_wait();
#pragma unroll
      for (int n = 0; n < kSteps * 4; ++n) hold(a[n / 4][n % 4]);
      __syncwarp();
      if (lane == 0) mbar_arrive(ring.empty + 8 * at.stage);
#pragma unroll
      for (int n = 0; n < kSteps * 4; ++n) a[n / 4][n % 4] = ahead[n / 4][n % 4];
      at = next;
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles * 4; ++n) hold(acc[n / 4][n % 4]);
  }
};

}  // namespace eaglex::stream
