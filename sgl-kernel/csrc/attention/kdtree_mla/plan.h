// SPDX-License-Identifier: Apache-2.0
// How a call is cut: a function of the shape and the device alone, so that a captured graph serves any lengths.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "tiles.h"

namespace kdtree {

struct Plan {
  bool small_tile;
  int32_t rows_a_block, row_blocks, groups, blocks;

  // Warps of the combine kernel that share a row's splits: one, unless a request of the batch has many.
  static constexpr int kManyRowWarps = 8;
  int row_warps(int64_t batch) const { return groups >= kManyRowWarps * batch ? kManyRowWarps : 1; }

  // Rows of partial results, each kLatent columns, a sum and a peak, all fp32. One group never leaves any.
  int64_t partial_rows() const { return groups == 1 ? 0 : int64_t{groups} * 2 * row_blocks * rows_a_block; }
  int64_t workspace_bytes() const { return partial_rows() * (kLatent + 2) * 4; }
};

// `resident`: blocks of the small and of the large tile that run at a time on the device.
//
// Work items are groups * row_blocks. They fill the device in whole waves as well as they can; more waves only where
// that gains a tenth, because every item loads its query and may leave partial results.
inline Plan make_plan(int64_t heads, int64_t width, const std::array<int, 2>& resident) {
  const int64_t rows = heads * width;
  Plan plan{};
  plan.small_tile = takes_small_tile(rows);
  plan.rows_a_block = plan.small_tile ? SmallTile::kRows : LargeTile::kRows;
  plan.row_blocks = static_cast<int32_t>((rows + plan.rows_a_block - 1) / plan.rows_a_block);
  const int at_a_time = resident[plan.small_tile ? 0 : 1];
  double best = 0;
  for (int waves = 1; waves <= 4; ++waves) {
    const int32_t groups = std::max(1, waves * at_a_time / plan.row_blocks);
    const int64_t items = int64_t{groups} * plan.row_blocks;
    const double used =
        static_cast<double>(items) / static_cast<double>((items + at_a_time - 1) / at_a_time * at_a_time);
    if (used > best * 1.1) {
      best = used;
      plan.groups = groups;
    }
  }
  plan.blocks = static_cast<int32_t>(std::min<int64_t>(at_a_time, int64_t{plan.groups} * plan.row_blocks));
  return plan;
}

}  // namespace kdtree
