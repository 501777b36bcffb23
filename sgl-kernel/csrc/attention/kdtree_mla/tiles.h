// SPDX-License-Identifier: Apache-2.0
// Tile sizes, the table of instantiated kernels, and how much of everything a block takes. Host and device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KDTREE_HOST_DEVICE __host__ __device__
#else
#define KDTREE_HOST_DEVICE
#endif

namespace kdtree {

// The model's: a key is 512 latent columns, which are also the value, then 64 rope columns.
constexpr int kLatent = 512;
constexpr int kHeadDim = 576;

// The same in every kernel: 8 warps, and tiles of 16 keys, the depth of one mma of the value product.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTileKeys = 16;
constexpr int kKeyBytes = kHeadDim * 2;  // bf16 or fp16
constexpr int kStageBytes = kTileKeys * kKeyBytes;

// Scores: 2 groups of warps share the rows, the 4 warps of a group share the 36 steps of the head dimension.
constexpr int kRowGroups = 2;
constexpr int kDepthWarps = kWarps / kRowGroups;
constexpr int kDepthSteps = kHeadDim / 16 / kDepthWarps;
static_assert(kDepthSteps * kDepthWarps * 16 == kHeadDim);

// Values: every warp takes all rows and 64 of the 512 columns.
constexpr int kWarpColumns = kLatent / kWarps;

// What a block of sm_120, 86 and 89 may have at most.
constexpr int kMaxSharedBytes = 101376;

// A block attends kRows query rows (a row is a head of a draft token) and holds kStages tiles of keys.
template <int kRowTiles_, int kStages_, int kBlocksAnSm_>
struct Tile {
  static constexpr int kRowTiles = kRowTiles_;  // m16 tiles a group of warps
  static constexpr int kStages = kStages_;
  static constexpr int kBlocksAnSm = kBlocksAnSm_;  // that the registers are to allow; memory may allow fewer
  static constexpr int kGroupRows = 16 * kRowTiles;
  static constexpr int kRows = kRowGroups * kGroupRows;
  static constexpr int kUnits = 2 * kRowTiles;  // of 8 rows, a group; a warp owns the softmax of one
  static_assert(kUnits <= kDepthWarps);

  // Shared memory, in bytes from its start. `scores`: the parts of a unit's scores that its owner gets from the other
  // warps. `weights`: two buffers of bf16 or fp16 [kRows, 16]. `scale`: two buffers of fp32 [kRows], what the
  // accumulator is scaled by before a tile is added. `sum`, `peak`: fp32 [kRows], the softmax at a segment's end.
  static constexpr int kScores = kStages * kStageBytes;
  static constexpr int kWeights = kScores + kRowGroups * kUnits * (kDepthWarps - 1) * 32 * 16;
  static constexpr int kScale = kWeights + 2 * kRows * kTileKeys * 2;
  static constexpr int kSum = kScale + 2 * kRows * 4;
  static constexpr int kPeak = kSum + kRows * 4;
  static constexpr int kSharedBytes = kPeak + kRows * 4;
  static_assert(kSharedBytes <= kMaxSharedBytes);

  // Bytes that go through shared memory for one tile of keys: copy in, keys and values out, scores and weights both
  // ways.
  static constexpr int kSharedTraffic = kStageBytes + kRowGroups * kStageBytes + kTileKeys * kLatent * 2 +
                                        2 * kRowGroups * kUnits * (kDepthWarps - 1) * 32 * 16 +
                                        (1 + kWarps) * kRows * kTileKeys * 2;
};

using SmallTile = Tile<1, 5, 1>;  // 32 rows
using LargeTile = Tile<2, 4, 1>;  // 64 rows

// The table: few rows take the small tile, which is quicker and prefetches further; otherwise a tile of keys should
// serve as many rows as the registers hold.
inline bool takes_small_tile(int64_t rows) { return rows <= SmallTile::kRows; }

}  // namespace kdtree
