// Launcher of pack_decode without logit soft-cap; the other one is compiled beside it, in its own file.
#include "launch.h"
#include "pack_decode/launch_pack_decode.cuh"

namespace pat {

cudaError_t launch_pack_decode_soft_cap(const DecodeParams& params, cudaStream_t stream);

cudaError_t launch_pack_decode(const DecodeParams& params, cudaStream_t stream) {
  if (params.soft_cap) return launch_pack_decode_soft_cap(params, stream);
  return PackDecodeVariant<false>::launch(params, stream);
}

// The variant with soft-cap holds as many: both are compiled for as many CTAs per SM.
cudaError_t count_decode_ctas(int* count) { return PackDecodeVariant<false>::count_ctas(count); }

}  // namespace pat
