// norm_rope: what a layer does between its projections and its attention, in one launch.
//
// The query's latent part is normed; the key's latent part is normed, its rotary part rotated, and
// both are stored in the MLA cache; the indexer's key is normed, rotated, quantised and stored in
// the indexer cache; rows of top-k indices are filled with -1. These parts are independent: each
// thread block does one of them for as many tokens as it has warps.

#include "norm_rope_index_key.cuh"
#include "norm_rope_key.cuh"
#include "norm_rope_params.cuh"
#include "norm_rope_query.cuh"
#include "norm_rope_token.cuh"
#include "norm_rope_topk.cuh"
#include "paging.cuh"
#include "types.cuh"

namespace cupy_mla {

template <class Format>
__device__ __forceinline__ void norm_rope(const NormRopeParams& p) {
  using Input = typename Format::Input;
  const i32 group = static_cast<i32>(divide(blockIdx.x, p.parts));
  const u32 place = blockIdx.x - group * p.parts.value;
  const u32 part = static_cast<u32>(p.part_kinds) >> 8 * place & 0xFFu;
  const i32 index = group * static_cast<i32>(blockDim.y) + static_cast<i32>(threadIdx.y);
  const WarpToken token = {static_cast<i32>(threadIdx.x), index, index < p.tokens};
  if (part == kQueryPart) {
    norm_query<Input>(p, token);
  } else if (part == kKeyPart) {
    store_key<Format>(p, token);
  } else if (part == kIndexPart) {
    store_index_key<Input>(p, token);
  } else {
    fill_indices(p, token);
  }
}

}  // namespace cupy_mla
