// SPDX-License-Identifier: Apache-2.0
// The attention kernel. A block attends kRows query rows (heads x draft tokens of a request) to a share of the keys.
//
// A key tile is 16 keys of 1,152 bytes, copied once to shared memory; its first 1,024 bytes a key are also the values.
// The 8 warps meet twice a tile:
//
//   barrier of the block: tile i+1 is here, the weights of tile i are written, tile i-1 is done with
//     start the copy of tile i + kStages - 1 into the place of tile i-1
//     scores of tile i+1: a warp has 16 kRowTiles rows and a quarter of the head dimension, its query in registers
//       it hands its parts to the warps that own the rows, through shared memory
//   barrier of the row group
//     softmax of tile i+1: each owner adds up 8 rows, finds the peak, writes the weights and the rows' rescaling
//     values of tile i: every warp, all rows, its 64 columns, accumulator in registers
//
// so that the softmax of one tile overlaps with the value product of the one before, and scores never leave the SM.
//
// Swizzle: 16-byte chunk c of key k lies at chunk c ^ (k % 8) of its row, so that the 8 rows that an ldmatrix takes at
// a time lie in different banks although a row is a multiple of 128 bytes.
#pragma once

#include "params.h"
#include "primitives.cuh"
#include "schedule.cuh"

namespace kdtree {

constexpr float kInfinity = __builtin_huge_valf();

// The accumulator follows the running peak of a row only when that grew by 2^8; until then the weights are up to 2^8,
// which fp32 sums and 16-bit weights hold without loss. (FlashAttention-4's conditional rescaling.)
constexpr float kPeakSlack = 8.f;

// The natural logarithm of sum * 2^peak.
KDTREE_DEVICE float natural_lse(float sum, float peak) {
  return sum > 0.f ? (peak + log2f(sum)) * 0.6931471805599453f : -kInfinity;
}

template <class T, class Tile>
struct VerifyBlock {
  static constexpr int kRowTiles = Tile::kRowTiles;
  static constexpr int kUnits = Tile::kUnits;
  static constexpr int kStages = Tile::kStages;

  const VerifyParams& p;
  const uint32_t shared = shared_memory();
  const int lane = lane_index();
  const int warp = warp_index();
  const int row_group = warp / kDepthWarps;
  const int depth = warp % kDepthWarps;
  const bool owner = depth < kUnits;  // of unit `depth` of the group, the softmax of 8 rows

  // The segment.
  int row_block;
  int prefix, keys;  // of the request; keys counts the draft tokens
  const int32_t* slots;

  // Registers that last from tile to tile.
  uint32_t query[kRowTiles][kDepthSteps][4];
  float accumulator[2 * kRowTiles][kWarpColumns / 8][4];
  float peak, sum;  // of the owner's row lane / 4; the sum only over this lane's keys

  KDTREE_DEVICE explicit VerifyBlock(const VerifyParams& params) : p(params) {}

  // ---- keys in

  // A thread copies every 16th chunk of key thread / 16 of a tile; the table entry is read a tile ahead.
  KDTREE_DEVICE int copied_position(int tile) const { return tile * kTileKeys + thread_index() / 16; }

  KDTREE_DEVICE int32_t table_entry(int tile) const {
    const int position = copied_position(tile);
    if (position >= keys) return 0;
    return slots[p.page == 1 ? position : position / p.page];
  }

  KDTREE_DEVICE void copy_tile(int stage, int tile, int32_t entry) const {
    const int position = copied_position(tile);
    const bool valid = position < keys;
    const int64_t slot = p.page == 1 || !valid ? entry : int64_t{entry} * p.page + position % p.page;
    const int key = thread_index() / 16;
    const int chunk = thread_index() % 16;
    const char* from = p.kv + slot * p.kv_stride_bytes + chunk * 16;
    const uint32_t to = shared + stage * kStageBytes + key * kKeyBytes + ((chunk ^ (key & 7)) << 4);
#pragma unroll
    for (int i = 0; i < kKeyBytes / 256; ++i) copy_async(to + i * 256, from + i * 256, valid);
    if (chunk < 8) copy_async(to + kKeyBytes / 256 * 256, from + kKeyBytes / 256 * 256, valid);
  }

  // ---- query in

  KDTREE_DEVICE void load_query(int request) {
    const uint16_t* base = static_cast<const uint16_t*>(p.q);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_block * Tile::kRows + row_group * Tile::kGroupRows + t * 16 + half * 8 + lane / 4;
        const bool valid = row < p.rows;
        const int token = row / p.heads;
        const int64_t offset = (int64_t{request} * p.width + token) * p.q_token_stride +
                               (row - token * p.heads) * p.q_head_stride + depth * 16 + (lane % 4) * 2;
        const uint32_t* from = reinterpret_cast<const uint32_t*>(base + (valid ? offset : 0));
#pragma unroll
        for (int s = 0; s < kDepthSteps; ++s) {
          query[t][s][half] = valid ? from[s * 32] : 0;
          query[t][s][half + 2] = valid ? from[s * 32 + 4] : 0;
        }
      }
    }
  }

  // ---- scores

  // The keys of a tile that the owner's row may see, bit by bit.
  KDTREE_DEVICE uint32_t visible_keys(int request, int tile) const {
    const int first = tile * kTileKeys - prefix;  // draft token of the tile's first key, below 0 in the prefix
    if (first + kTileKeys <= 0) return 0xffff;
    const int row = row_block * Tile::kRows + row_group * Tile::kGroupRows + depth * 8 + lane / 4;
    if (row >= p.rows) return 0;
    const int token = row / p.heads;
    if (p.tree_mask == nullptr) return low_bits(token + 1 - first);
    const uint32_t* words = p.tree_mask + (int64_t{request} * p.width + token) * p.mask_words;
    const int word = first >> 5;  // -1: the prefix
    const uint32_t low = word < 0 ? ~0u : word < p.mask_words ? words[word] : 0;
    const uint32_t high = word + 1 < p.mask_words ? words[word + 1] : 0;
    return funnel_right(low, high, first & 31) & low_bits(p.width - first);
  }

  KDTREE_DEVICE static uint32_t low_bits(int count) {
    return count <= 0 ? 0 : count >= 16 ? 0xffff : (1u << count) - 1;
  }

  KDTREE_DEVICE uint32_t handed_scores(int unit, int from) const {
    const int place = (row_group * kUnits + unit) * (kDepthWarps - 1) + ((from - unit - 1) & (kDepthWarps - 1));
    return shared + Tile::kScores + (place * 32 + lane) * 16;
  }

  // This warp's parts of the scores of a tile; `own` is the unit that it owns, the others are handed out.
  // A unit is 8 rows and 16 keys: a lane has row lane / 4, keys lane % 4 * 2 + {0, 1, 8, 9}.
  KDTREE_DEVICE void score(int stage, float (&own)[4]) const {
    float part[kRowTiles][2][4] = {};
    const int key = (lane & 7) | ((lane & 16) >> 1);
    const uint32_t from =
        shared + stage * kStageBytes + key * kKeyBytes + (((depth * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
#pragma unroll
    for (int s = 0; s < kDepthSteps; ++s) {
      uint32_t k[4];
      load_matrices(k, from + s * 128);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        multiply_add(T{}, part[t][0], query[t][s], k[0], k[1]);
        multiply_add(T{}, part[t][1], query[t][s], k[2], k[3]);
      }
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int t = unit / 2, c = unit % 2 * 2;
      const float values[4] = {part[t][0][c], part[t][0][c + 1], part[t][1][c], part[t][1][c + 1]};
      if (unit == depth) {
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = values[i];
      } else {
        store_shared(handed_scores(unit, depth), values);
      }
    }
  }

  // Row of the block that the owner's lane has.
  KDTREE_DEVICE int owned_row() const { return row_group * Tile::kGroupRows + depth * 8 + lane / 4; }

  // Turns the scores of the owned rows into weights; says whether the accumulator's row must be rescaled.
  KDTREE_DEVICE bool softmax(int buffer, float (&score)[4], uint32_t visible) {
#pragma unroll
    for (int i = 1; i < kDepthWarps; ++i) {
      float part[4];
      load_shared(handed_scores(depth, (depth + i) & (kDepthWarps - 1)), part);
#pragma unroll
      for (int j = 0; j < 4; ++j) score[j] += part[j];
    }
    const uint32_t mine = visible >> (lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int bit = j % 2 + j / 2 * 8;
      score[j] = mine >> bit & 1 ? score[j] * p.scale_log2 : -kInfinity;
    }
    float top = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    top = fmaxf(top, shuffle_xor(top, 1));
    top = fmaxf(top, shuffle_xor(top, 2));
    const float old = peak;
    if (top > old + kPeakSlack) peak = top;
    const float scale = peak == old ? 1.f : exp2_fast(old - peak);  // 0 at a row's first visible key
    const float base = peak == -kInfinity ? 0.f : peak;
#pragma unroll
    for (int j = 0; j < 4; ++j) score[j] = exp2_fast(score[j] - base);
    const int row = owned_row();
    const uint32_t to = shared + Tile::kWeights + (buffer * Tile::kRows + row) * (kTileKeys * 2) + lane % 4 * 4;
    const int swap = row >> 2 & 1;
    store_shared(to + (swap << 4), pack(T{}, score[0], score[1]));
    store_shared(to + ((swap ^ 1) << 4), pack(T{}, score[2], score[3]));
    sum = sum * scale + ((score[0] + score[1]) + (score[2] + score[3]));
    if (lane % 4 == 0) store_shared(shared + Tile::kScale + (buffer * Tile::kRows + row) * 4, scale);
    return scale != 1.f;
  }

  // ---- values

  KDTREE_DEVICE void rescale(int buffer) {
    const uint32_t from = shared + Tile::kScale + (buffer * Tile::kRows + lane / 4) * 4;
#pragma unroll
    for (int t = 0; t < 2 * kRowTiles; ++t) {
      const float low = load_shared(from + t * 64);
      const float high = load_shared(from + t * 64 + 32);
#pragma unroll
      for (int n = 0; n < kWarpColumns / 8; ++n) {
        accumulator[t][n][0] *= low;
        accumulator[t][n][1] *= low;
        accumulator[t][n][2] *= high;
        accumulator[t][n][3] *= high;
      }
    }
  }

  KDTREE_DEVICE void add_values(int buffer, int stage) {
    uint32_t weights[2 * kRowTiles][4];
    const int row = lane & 15;
    const uint32_t from = shared + Tile::kWeights + (buffer * Tile::kRows + row) * (kTileKeys * 2) +
                          (((lane >> 4) ^ (row >> 2 & 1)) << 4);
#pragma unroll
    for (int t = 0; t < 2 * kRowTiles; ++t) load_matrices(weights[t], from + t * 16 * kTileKeys * 2);
    const uint32_t values =
        shared + stage * kStageBytes + row * kKeyBytes + warp * (kWarpColumns * 2) + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
    for (int n = 0; n < kWarpColumns / 16; ++n) {
      uint32_t v[4];
      load_matrices_transposed(v, values ^ (n << 5));
#pragma unroll
      for (int t = 0; t < 2 * kRowTiles; ++t) {
        multiply_add(T{}, accumulator[t][2 * n], weights[t], v[0], v[1]);
        multiply_add(T{}, accumulator[t][2 * n + 1], weights[t], v[2], v[3]);
      }
    }
  }

  // ---- a segment

  KDTREE_DEVICE void attend(const Segment& segment, int group) {
    prefix = prefix_len(p, segment.request);
    keys = prefix + p.width;
    slots = p.slot_table + p.table_rows[segment.request] * p.slot_table_stride;
    const int tiles = segment.end - segment.begin;

#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < tiles) copy_tile(i, segment.begin + i, table_entry(segment.begin + i));
      commit_copies();
    }
    int32_t next_entry = table_entry(segment.begin + kStages - 1);
    load_query(segment.request);
    peak = -kInfinity;
    sum = 0.f;
#pragma unroll
    for (int t = 0; t < 2 * kRowTiles; ++t) {
#pragma unroll
      for (int n = 0; n < kWarpColumns / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) accumulator[t][n][j] = 0.f;
      }
    }

    wait_copies<kStages - 2>();
    barrier();
    bool must_rescale = score_and_weigh(segment.request, segment.begin, 0, 0);
    int stage = 0;
    for (int i = 0; i < tiles; ++i) {
      const int next_stage = stage + 1 == kStages ? 0 : stage + 1;
      const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
      const int buffer = i & 1;
      wait_copies<kStages - 3>();
      const bool any = barrier_or(must_rescale);
      if (i + kStages - 1 < tiles) copy_tile(free_stage, segment.begin + i + kStages - 1, next_entry);
      commit_copies();
      next_entry = table_entry(segment.begin + i + kStages);
      if (i + 1 < tiles) must_rescale = score_and_weigh(segment.request, segment.begin + i + 1, next_stage, buffer ^ 1);
      if (any) rescale(buffer);
      add_values(buffer, stage);
      stage = next_stage;
    }
    write(segment, group);
  }

  KDTREE_DEVICE bool score_and_weigh(int request, int tile, int stage, int buffer) {
    const uint32_t visible = owner ? visible_keys(request, tile) : 0;  // early: it may wait for memory
    float own[4];
    score(stage, own);
    barrier(1 + row_group, kDepthWarps * 32);
    return owner && softmax(buffer, own, visible);
  }

  // ---- results out

  KDTREE_DEVICE void write(const Segment& segment, int group) {
    if (owner) {
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      if (lane % 4 == 0) {
        store_shared(shared + Tile::kSum + owned_row() * 4, sum);
        store_shared(shared + Tile::kPeak + owned_row() * 4, peak);
      }
    }
    barrier();  // also: nobody reads this segment's keys any more
    const int64_t first_out = int64_t{segment.request} * p.rows;
    const int64_t first_partial = partial_row(p, Tile::kRows, group, segment.begin == 0, row_block);
    const int column = warp * kWarpColumns + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < 2 * kRowTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int block_row = t * 16 + half * 8 + lane / 4;
        const int row = row_block * Tile::kRows + block_row;
        if (row >= p.rows) continue;
        const float row_sum = load_shared(shared + Tile::kSum + block_row * 4);
        const float row_peak = load_shared(shared + Tile::kPeak + block_row * 4);
        const bool first_of_row = warp == 0 && lane % 4 == 0;
        if (segment.whole()) {
          const float norm = row_sum > 0.f ? p.k_scale / row_sum : 0.f;
          uint32_t* to = static_cast<uint32_t*>(p.out) + ((first_out + row) * kLatent + column) / 2;
#pragma unroll
          for (int n = 0; n < kWarpColumns / 8; ++n) {
            to[n * 4] = pack(T{}, accumulator[t][n][half * 2] * norm, accumulator[t][n][half * 2 + 1] * norm);
          }
          if (first_of_row && p.lse != nullptr) p.lse[first_out + row] = natural_lse(row_sum, row_peak);
        } else {
          const int64_t partial = first_partial + block_row;
          float2* to = reinterpret_cast<float2*>(p.partial_out + partial * kLatent + column);
#pragma unroll
          for (int n = 0; n < kWarpColumns / 8; ++n) {
            to[n * 4] = make_float2(accumulator[t][n][half * 2], accumulator[t][n][half * 2 + 1]);
          }
          if (first_of_row) {
            p.partial_sum[partial] = row_sum;
            p.partial_peak[partial] = row_peak;
          }
        }
      }
    }
  }
};

// Grid: any number of blocks. Work item i is row block i % row_blocks for group i / row_blocks.
template <class T, class Tile>
KDTREE_KERNEL(kThreads, Tile::kBlocksAnSm)
verify_kernel(const VerifyParams p) {
  VerifyBlock<T, Tile> block(p);
  const int all = all_tiles(p);
  const int share = share_of(p, all);
  for (int item = block_index(); item < p.groups * p.row_blocks; item += block_count()) {
    const int group = item / p.row_blocks;
    block.row_block = item % p.row_blocks;
    const int begin = group * share;
    const int end = begin + share < all ? begin + share : all;
    if (begin >= end) continue;
    Place place;
    int request = request_at(p, begin, place);
    for (int tile = begin;;) {
      const int stop = place.first + place.tiles < end ? place.first + place.tiles : end;
      block.attend({request, tile - place.first, stop - place.first, place.tiles}, group);
      if (stop == end) break;
      tile = stop;
      do {
        place = {tile, tiles_of(p, ++request)};
      } while (place.tiles == 0);
    }
  }
}

}  // namespace kdtree
