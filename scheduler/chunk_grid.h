// Where batch-invariant plans cut KV. The cuts are at the same positions for every request and every batch. Chunks get
// longer with the position, so that a long request does not have hundreds of partials.
#pragma once

#include <cstdint>
#include <limits>

namespace pat {

class ChunkGrid {
 public:
  // Number of tokens that a kernel multiplies in one step. Within a chunk, shared ranges begin and end at multiples of
  // this number, so that a row has the same steps however its KV is divided into segments.
  static constexpr int32_t kStepTokens = 64;

  // Number of tokens of the chunk that contains a position: 512 below position 8,192, 1,024 below 32,768, 2,048 below
  // 131,072, and so on.
  static constexpr int32_t chunk_tokens(int32_t position) {
    return region_of(position).chunk_tokens;
  }
  // True if a request of this length is cut at the boundary. A remainder shorter than half a chunk belongs to the chunk
  // before it, so that no partial has only a few tokens.
  static constexpr bool is_cut(int32_t boundary, int32_t length) {
    return length > boundary && (boundary == 0 || length - boundary >= smallest_tail(boundary));
  }
  // End of the chunk that begins at the cut `begin`, in a request of this length.
  static constexpr int32_t chunk_end(int32_t begin, int32_t length) {
    const int64_t next = int64_t{begin} + chunk_tokens(begin);
    return next < length && is_cut(static_cast<int32_t>(next), length) ? static_cast<int32_t>(next)
                                                                       : length;
  }
  // The greatest length to which a request can grow from `length` before it gets one more cut. `length` must not be 0.
  static constexpr int64_t last_length(int32_t length) {
    const int32_t boundary = (length - 1) - (length - 1) % chunk_tokens(length - 1);
    if (!is_cut(boundary, length)) return int64_t{boundary} + smallest_tail(boundary) - 1;
    const int64_t next = int64_t{boundary} + chunk_tokens(boundary);
    if (next > std::numeric_limits<int32_t>::max()) return next;
    return next + smallest_tail(static_cast<int32_t>(next)) - 1;
  }
  // Number of chunks of a request of this length.
  static constexpr int32_t num_chunks(int32_t length) {
    int32_t count = 0;
    int64_t begin = 0;
    for (Region region; begin < length; region = region.next()) {
      const int64_t end = region.end < length ? region.end : length;
      count += static_cast<int32_t>((end - begin + region.chunk_tokens - 1) / region.chunk_tokens);
      begin = end;
    }
    if (count < 2) return count;
    const int32_t boundary = (length - 1) - (length - 1) % chunk_tokens(length - 1);
    return is_cut(boundary, length) ? count : count - 1;
  }

 private:
  // The fewest tokens that a request's last chunk may have if it begins at `boundary`, unless it is the only chunk.
  static constexpr int32_t smallest_tail(int32_t boundary) { return chunk_tokens(boundary) / 2; }

  struct Region {
    int64_t end = 8192;
    int32_t chunk_tokens = 512;

    constexpr Region next() const { return {4 * end, 2 * chunk_tokens}; }
  };

  static constexpr Region region_of(int32_t position) {
    Region region;
    while (position >= region.end) region = region.next();
    return region;
  }
};

}  // namespace pat
