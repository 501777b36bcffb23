// SPDX-License-Identifier: Apache-2.0
// Who attends which keys. Lengths are known on the device alone, so every warp works its share out for itself.
//
// The tiles of keys of all requests stand in one line, request after request. The line is cut into equal shares, one a
// group of blocks; the blocks of a group attend the same keys for different query rows, at the same time, so that
// these keys come from memory once. A share may hold the end of one request, some whole ones and the start of another:
// its segments. Uneven requests cost nothing. ("Stream-K" of Osama et al., arXiv 2301.03598, over the keys.)
#pragma once

#include "params.h"
#include "primitives.cuh"

namespace kdtree {

// Below this a share is not cut further: merging would cost more than it saves.
constexpr int kMinShare = 4;

// Tiles [begin, end) of one request, of which it has `total`.
struct Segment {
  int request;
  int begin, end, total;
  KDTREE_DEVICE bool whole() const { return begin == 0 && end == total; }
};

// A request's place in the line: its first tile and how many it has.
struct Place {
  int first, tiles;
};

KDTREE_DEVICE int prefix_len(const VerifyParams& p, int request) {
  return p.prefix_lens_are_64_bit ? static_cast<int>(static_cast<const int64_t*>(p.prefix_lens)[request])
                                  : static_cast<const int32_t*>(p.prefix_lens)[request];
}

KDTREE_DEVICE int tiles_of(const VerifyParams& p, int request) {
  const int prefix = prefix_len(p, request);
  return prefix < 0 ? 0 : (prefix + p.width + kTileKeys - 1) / kTileKeys;
}

// Tiles of requests 0 .. 31 of the 32 from `base`, summed up to and with each lane's own. All lanes of a warp call it.
KDTREE_DEVICE int tiles_up_to_lane(const VerifyParams& p, int base) {
  const int lane = lane_index();
  int sum = base + lane < p.batch ? tiles_of(p, base + lane) : 0;
  for (int step = 1; step < 32; step *= 2) {
    const int below = shuffle_up(sum, step);
    if (lane >= step) sum += below;
  }
  return sum;
}

KDTREE_DEVICE int all_tiles(const VerifyParams& p) {
  int sum = 0;
  for (int base = 0; base < p.batch; base += 32) sum += shuffle(tiles_up_to_lane(p, base), 31);
  return sum;
}

// Tiles a group, of all of them.
KDTREE_DEVICE int share_of(const VerifyParams& p, int all) {
  const int share = (all + p.groups - 1) / p.groups;
  return share > kMinShare ? share : kMinShare;
}

KDTREE_DEVICE Place place_of(const VerifyParams& p, int request) {
  int first = 0;
  int base = 0;
  for (; base + 32 <= request; base += 32) first += shuffle(tiles_up_to_lane(p, base), 31);
  const int sum = tiles_up_to_lane(p, base);
  const int end = shuffle(sum, request - base);
  const int begin = request == base ? 0 : shuffle(sum, request - base - 1);
  return {first + begin, end - begin};
}

// The request that has tile `tile` of the line, and where it stands; `tile` lies in the line.
KDTREE_DEVICE int request_at(const VerifyParams& p, int tile, Place& place) {
  int first = 0;
  for (int base = 0;; base += 32) {
    const int sum = first + tiles_up_to_lane(p, base);
    const uint32_t beyond = ballot(sum > tile);
    if (beyond != 0) {
      const int lane = first_set_bit(beyond);
      const int end = shuffle(sum, lane);
      const int begin = lane == 0 ? first : shuffle(sum, lane - 1);
      place = {begin, end - begin};
      return base + lane;
    }
    first = shuffle(sum, 31);
  }
}

// Where the rows of a segment that is not whole leave their partial results: of a group's two places, the first is for
// the segment that goes on from the group before, the second for the one that starts here.
KDTREE_DEVICE int64_t partial_row(const VerifyParams& p, int rows_a_block, int group, bool starts, int row_block) {
  return ((int64_t{group} * 2 + (starts ? 1 : 0)) * p.row_blocks + row_block) * rows_a_block;
}

}  // namespace kdtree
