// Launcher of pack_decode with logit soft-cap.
#include "pack_decode/launch_pack_decode.cuh"

namespace pat {

cudaError_t launch_pack_decode_soft_cap(const DecodeParams& params, cudaStream_t stream) {
  return PackDecodeVariant<true>::launch(params, stream);
}

}  // namespace pat
