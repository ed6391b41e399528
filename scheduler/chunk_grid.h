// Where the KV of a batch-invariant plan is cut: at positions that are the same for every request, whatever runs beside
// it. Chunks grow with the position, so that a long request does not have hundreds of partials.
#pragma once

#include <cstdint>

namespace pat {

class ChunkGrid {
 public:
  // Ranges that only some requests of a work item share begin and end at multiples of this within a chunk: of the tokens
  // that a body takes in one step. So a row's steps are the same ones, whatever segments they are in.
  static constexpr int32_t kStepTokens = 64;

  // Tokens of the chunk that a position lies in: 512 up to position 8,192, then twice as many each time that the
  // position is four times as far.
  static constexpr int32_t chunk_tokens(int32_t position) {
    return region_of(position).chunk_tokens;
  }
  // The last boundary that is not behind a position.
  static constexpr int32_t boundary_before(int32_t position) {
    return position - position % chunk_tokens(position);
  }
  // The first boundary that is not before a length: a request of that many tokens fills its chunks up to there.
  static constexpr int64_t boundary_after(int32_t length) {
    const int32_t before = boundary_before(length);
    return before == length ? length : int64_t{before} + chunk_tokens(length);
  }
  // Chunks of a request of a length, the last one included.
  static constexpr int32_t num_chunks(int32_t length) {
    int32_t count = 0;
    int64_t begin = 0;
    for (Region region; begin < length; region = region.next()) {
      const int64_t end = region.end < length ? region.end : length;
      count += static_cast<int32_t>((end - begin + region.chunk_tokens - 1) / region.chunk_tokens);
      begin = end;
    }
    return count;
  }

 private:
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
